"""Descriptions of GPUs, and what is said where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cuattn import device
from cuattn.errors import BackendUnavailable


@pytest.mark.parametrize(("value", "arch"), [("", None), ("compute_80", 80), ("compute_120", 120)])
def test_forced_arch(value: str, arch: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUATTN_ARCH", value)
    assert device.forced_arch() == arch


@pytest.mark.parametrize("value", ["80", "sm_80", "compute_", "compute_8x"])
def test_forced_arch_names_what_it_takes(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUATTN_ARCH", value)
    with pytest.raises(ValueError, match=r"CUATTN_ARCH: got .*compute_75"):
        device.forced_arch()


def test_a_forced_architecture_has_its_own_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_query", lambda _: device.H200)
    monkeypatch.setenv("CUATTN_ARCH", "compute_75")
    found = device.query(0)
    assert (found.arch, found.sm_count, found.name) == (75, device.H200.sm_count, "H200")
    assert found.shared_memory_per_block == device.T4.shared_memory_per_block
    monkeypatch.setenv("CUATTN_ARCH", "compute_100")
    with pytest.raises(BackendUnavailable, match="only sm_90"):
        device.query(0)


def test_models_are_one_an_architecture() -> None:
    assert all(model.arch == arch for arch, model in device.MODELS.items())
    for model in device.MODELS.values():
        assert model.shared_memory_per_block <= model.shared_memory_per_sm


def test_without_a_gpu_the_reason_says_what_to_install() -> None:
    root = str(Path(__file__).parent.parent)
    code = "from cuattn import device; print(device.unavailable())"
    said = subprocess.check_output([sys.executable, "-W", "ignore", "-c", code], cwd=root, text=True).strip()
    assert said == "None" or "install" in said or "CUDA_VISIBLE_DEVICES" in said or "needs sm_" in said
