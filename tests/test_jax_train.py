"""The example's GPT on a mesh of data, tensor and sequence: one device's loss curve; remat; resuming."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_examples import EXAMPLES, load

jax = pytest.importorskip("jax")
from jax.sharding import Mesh  # noqa: E402

pytestmark = pytest.mark.skipif(
    len(jax.devices("cpu")) < 8 or not hasattr(jax, "shard_map"),
    reason="needs eight CPU devices and jax.shard_map",
)


def train(gpt: Any, attention: Any, **options: Any) -> list[float]:
    """The losses of ten steps, or of those that ``options`` leave."""
    config = gpt.QUICK._replace(heads=4, steps=10, context=64)
    losses: list[float] = gpt.train(config, gpt.corpus(100_000), attention, report=False, **options)[1]
    return losses


@pytest.fixture(scope="module")
def gpt() -> Any:
    return load("train_gpt")


@pytest.fixture(scope="module")
def wanted(gpt: Any) -> list[float]:
    return train(gpt, gpt.flash)


@pytest.fixture(scope="module")
def mesh() -> Any:
    return Mesh(np.array(jax.devices("cpu")[:8]).reshape(2, 2, 2), ("data", "tensor", "seq"))


def test_one_import_switches_to_the_attention_of_jax(gpt: Any, wanted: list[float], tmp_path: Path) -> None:
    """The example's script, that line changed and nothing else, has the same loss curve."""
    line = "from cuattn.interop.jax import dot_product_attention"
    source = (EXAMPLES / "train_gpt.py").read_text()
    assert source.count(f"\n{line}\n") == 1
    (tmp_path / "their_gpt.py").write_text(source.replace(line, "from jax.nn import dot_product_attention"))
    theirs = load("their_gpt", tmp_path)
    assert theirs.dot_product_attention is jax.nn.dot_product_attention
    np.testing.assert_allclose(train(theirs, theirs.flash), wanted, rtol=2e-4)


def test_the_loss_curve_is_that_of_one_device(gpt: Any, wanted: list[float], mesh: Any) -> None:
    """Batch over data, heads and weights over tensor, the sequence round a ring."""
    losses = train(gpt, gpt.ring_on(mesh), mesh=mesh)
    np.testing.assert_allclose(losses, wanted, rtol=2e-4)
    assert losses[-1] < losses[0]


def test_resuming_continues_the_curve(gpt: Any, wanted: list[float], mesh: Any, tmp_path: Path) -> None:
    """Written on a mesh, read on another layout: the weights in the file are whole."""
    resumed = functools.partial(train, gpt, checkpoint=tmp_path / "state.npz")
    before = resumed(gpt.ring_on(mesh), mesh=mesh, stop=5)
    after = resumed(gpt.flash)
    assert len(before) == len(after) == 5
    np.testing.assert_allclose(before + after, wanted, rtol=2e-4)


def test_the_script_on_a_mesh_with_remat(
    gpt: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a user starts it, twice: the second run finds nothing left to do."""
    monkeypatch.setattr(gpt, "sample", lambda *_: "")
    monkeypatch.setattr(gpt, "QUICK", gpt.QUICK._replace(layers=1))
    options = ["--quick", "--mesh", "2,2,2", "--remat", "--checkpoint", str(tmp_path / "state.npz")]
    options += ["--steps", "6", "--plot", str(tmp_path / "loss.png")]
    gpt.main(options)
    out = capsys.readouterr().out
    assert "cuattn, {'data': 2, 'tensor': 2, 'seq': 2}" in out
    assert float(re.findall(r"two curves: (\S+)", out)[0]) < 1e-3
    with pytest.raises(SystemExit):
        gpt.main(options)
    assert "holds all 6 steps" in capsys.readouterr().err
