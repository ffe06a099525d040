"""Compiling and its cache on disk: keys, damage, many processes at once, homes that cannot be written to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cuattn import jit
from cuattn.program import Kernel

pytest.importorskip("cupy")
pytestmark = pytest.mark.usefixtures("compiler")
DEFINES = (("MASK", 1), ("SEGMENTS", 0), ("BLOCK_M", 16), ("BLOCK_N", 32))
KERNEL = Kernel("live_tiles", "live_tiles", DEFINES)  # the smallest


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty disk cache, and nothing in memory."""
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUATTN_ARCH", raising=False)
    monkeypatch.setattr(jit, "_memory", {})
    return tmp_path / "cache"


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Kernel]:
    """The kernels that were compiled, in order; compiling itself is left out."""
    done: list[Kernel] = []

    def build(kernel: Kernel, arch: int) -> jit.Compiled:
        done.append(kernel)
        return jit.Compiled(f"{kernel}{arch}".encode(), 1, 0, 0, ())

    monkeypatch.setattr(jit, "build", build)
    return done


def test_build_makes_machine_code() -> None:
    found = jit.build(KERNEL, 80)
    assert found.image.startswith(b"\x7fELF")
    assert found.registers > 0
    assert found.warnings == ()


def test_build_for_a_forced_architecture_makes_ptx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUATTN_ARCH", "compute_80")
    found = jit.build(KERNEL, 80)
    assert b".target sm_80" in found.image
    assert jit.target(80) == "compute_80"
    assert jit.target(90) == "sm_90a"


def test_a_refused_source_names_file_architecture_and_reason() -> None:
    wrong = replace(KERNEL, defines=(*DEFINES[:2], ("BLOCK_M", "nonsense"), DEFINES[3]))
    with pytest.raises(jit.CompileError, match=r"(?s)live_tiles\.cu for sm_80: .*nonsense"):
        jit.build(wrong, 80)


def test_read_log_finds_what_ptxas_says() -> None:
    log = """ptxas info    : Compiling entry function 'fwd' for 'sm_90a'
ptxas info    : Function properties for fwd
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 8 bytes cumulative stack size, 64 bytes smem
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
"""
    registers, spills, shared, warnings = jit.read_log(log)
    assert (registers, spills, shared) == (168, 28, 64)
    assert len(warnings) == 1 and "C7510" in warnings[0]
    assert jit.read_log("") == (0, 0, 0, ())


def test_memory_then_disk_then_compiler(builds: list[Kernel], folder: Path) -> None:
    first = jit.compiled(KERNEL, 80)
    assert jit.compiled(KERNEL, 80) is first and len(builds) == 1
    jit._memory.clear()
    assert jit.compiled(KERNEL, 80) == first and len(builds) == 1
    assert sorted(p.suffix for p in folder.iterdir()) == [".bin", ".json"]
    jit.compiled(KERNEL, 90)
    assert len(builds) == 2


@pytest.mark.parametrize(
    "changed", ["source", "header", "define", "entry", "options", "nvrtc", "arch", "forced"]
)
def test_a_key_covers_all_that_changes_the_code(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, kernel, arch = jit.key(KERNEL, 80), KERNEL, 80
    texts = dict(jit.sources())
    if changed in ("source", "header"):
        name = {"source": "live_tiles.cu", "header": "params.cuh"}[changed]
        monkeypatch.setattr(jit, "sources", lambda: {**texts, name: texts[name] + " "})
        monkeypatch.setattr(jit, "_files", jit._files.__wrapped__)
        monkeypatch.setattr(jit, "_files_digest", jit._files_digest.__wrapped__)
    elif changed == "define":
        kernel = replace(KERNEL, defines=(*DEFINES[:3], ("BLOCK_N", 64)))
    elif changed == "entry":
        kernel = replace(KERNEL, entry="other")
    elif changed == "options":
        monkeypatch.setattr(jit, "OPTIONS", (*jit.OPTIONS, "-lineinfo"))
    elif changed == "nvrtc":

        class Newer:
            @staticmethod
            def getVersion() -> tuple[int, int]:  # noqa: N802
                return 99, 1

        monkeypatch.setattr(jit, "import_nvrtc", Newer)
    elif changed == "arch":
        arch = 86
    else:
        monkeypatch.setenv("CUATTN_ARCH", "compute_80")
    assert jit.key(kernel, arch) != before


def test_a_source_comes_with_the_headers_it_reaches() -> None:
    files = list(jit._files(KERNEL.source))
    assert files[0] == "live_tiles.cu" and "params.cuh" in files and "ptx_sm90.cuh" not in files
    dropout = jit._files("fwd")  # through mask.cuh
    assert "philox.cuh" in dropout and '"philox.cuh"' not in jit.sources()["fwd.cu"]


@pytest.mark.parametrize(
    "damage", ["truncated", "no image", "no json", "other image", "not json", "empty", "old"]
)
def test_a_damaged_entry_is_rebuilt(damage: str, builds: list[Kernel], folder: Path) -> None:
    whole = jit.compiled(KERNEL, 80)
    image, facts = next(folder.glob("*.bin")), next(folder.glob("*.json"))
    if damage == "truncated":
        image.write_bytes(image.read_bytes()[:-1])
    elif damage == "no image":
        image.unlink()
    elif damage == "no json":
        facts.unlink()
    elif damage == "other image":
        image.write_bytes(b"x" * len(whole.image))
    elif damage == "not json":
        facts.write_text("{")
    elif damage == "empty":
        facts.write_text("[]")
    else:
        facts.write_text(
            json.dumps({k: v for k, v in json.loads(facts.read_text()).items() if k != "registers"})
        )
    jit._memory.clear()
    assert jit.compiled(KERNEL, 80) == whole and len(builds) == 2
    jit._memory.clear()
    assert jit.compiled(KERNEL, 80) == whole and len(builds) == 2  # whole again


def test_a_write_that_fails_leaves_nothing(
    builds: list[Kernel], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(jit.os, "replace", full)
    jit.compiled(KERNEL, 80)
    assert list(folder.iterdir()) == []
    assert jit.compiled(KERNEL, 80) and len(builds) == 1  # in memory


def test_a_cache_that_cannot_be_written_to(
    builds: list[Kernel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    jit.compiled(KERNEL, 80)
    jit.compiled(KERNEL, 80)
    assert len(builds) == 1


def test_compile_all_keeps_order(builds: list[Kernel]) -> None:
    kernels = [replace(KERNEL, entry=f"f{i}") for i in range(9)]
    found = jit.compile_all([(k, 80) for k in kernels])
    assert [x.image for x in found] == [f"{k}80".encode() for k in kernels]
    assert jit.compile_all([]) == []


# ---- processes ----

COMPILE = f"""
import hashlib, sys
from cuattn import jit
from cuattn.program import Kernel
if sys.argv[1] == "never":
    jit.build = None
kernels = [(Kernel("live_tiles", "live_tiles", {DEFINES}), arch) for arch in (80, 90)]
print(*(hashlib.sha256(x.image).hexdigest() for x in jit.compile_all(kernels)))
"""


def start(mode: str = "", **environment: str) -> subprocess.Popen[str]:
    root = str(Path(__file__).parent.parent)
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", COMPILE, mode],
        env={**os.environ, "PYTHONPATH": root, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return out.strip()


def test_many_processes_at_once_and_one_after(folder: Path) -> None:
    """All compile into one empty cache, each with two threads from the start; the last finds it all."""
    digests = {finish(p) for p in [start() for _ in range(4)]}
    assert len(digests) == 1
    assert finish(start("never")) in digests
    assert len(list(folder.glob("*.json"))) == 2 == len(list(folder.glob("*.bin")))
    assert list(folder.glob(".new-*")) == []


def test_a_home_that_is_not_there() -> None:
    assert finish(start(HOME="/proc/nowhere", CUATTN_CACHE_DIR="", XDG_CACHE_HOME=""))
