"""The example's GPT on a mesh of data, tensor and sequence: one device's loss curve; remat; resuming."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_examples import EXAMPLES, load

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from cuattn.interop.jax import ring_attention  # noqa: E402

pytestmark = pytest.mark.skipif(
    len(jax.devices("cpu")) < 8 or not hasattr(jax, "shard_map"),
    reason="needs eight CPU devices and jax.shard_map",
)
STEPS = 10


def shard(tree: Any, mesh: Any) -> Any:
    """Weights (or their moments) split over the mesh's tensor axis as Megatron does."""
    column, row = NamedSharding(mesh, P(None, "tensor")), NamedSharding(mesh, P("tensor"))
    whole = NamedSharding(mesh, P())
    places = {"qkv": column, "up": column, "proj": row, "down": row}

    def put(path: Any, x: Any) -> Any:
        return jax.device_put(x, places.get(getattr(path[-1], "key", None), whole))

    return jax.tree_util.tree_map_with_path(put, tree)


def train(gpt: Any, attention: Any, mesh: Any, saved: Path | None = None, stop: int = STEPS) -> list[float]:
    """Losses of the steps up to ``stop``; resumes from ``saved`` if it is there, and writes it at the end."""
    config = gpt.QUICK._replace(heads=4, steps=STEPS, context=64)
    params = gpt.init(config, jax.random.key(0))
    state = params, (jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params))
    first = 0
    if saved is not None and saved.exists():
        leaves, tree = jax.tree.flatten(state)
        with np.load(saved) as file:
            first = int(file["step"])
            state = jax.tree.unflatten(tree, [jnp.asarray(file[f"x{i}"]) for i in range(len(leaves))])
    if mesh is not None:
        state = shard(state, mesh)
    text, losses = gpt.corpus(100_000), []
    for n in range(first, stop):
        at = np.random.default_rng(n).integers(0, len(text) - config.context - 1, config.batch)
        tokens = jnp.asarray(np.stack([text[i : i + config.context + 1] for i in at]), jnp.int32)
        if mesh is not None:
            tokens = jax.device_put(tokens, NamedSharding(mesh, P("data")))
        *state, value = gpt.step(*state, jnp.float32(n), tokens, config, attention)
        losses.append(float(value))
    if saved is not None:
        arrays = {f"x{i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(tuple(state)))}
        np.savez(saved, step=stop, **arrays)
    return losses


@pytest.fixture(scope="module")
def gpt() -> Any:
    return load("train_gpt")


@pytest.fixture(scope="module")
def wanted(gpt: Any) -> list[float]:
    return train(gpt, gpt.flash, None)


def test_one_import_switches_to_the_attention_of_jax(gpt: Any, wanted: list[float], tmp_path: Path) -> None:
    """The example's script, that line changed and nothing else, has the same loss curve."""
    line = "from cuattn.interop.jax import dot_product_attention"
    source = (EXAMPLES / "train_gpt.py").read_text()
    assert source.count(f"\n{line}\n") == 1
    (tmp_path / "their_gpt.py").write_text(source.replace(line, "from jax.nn import dot_product_attention"))
    theirs = load("their_gpt", tmp_path)
    assert theirs.dot_product_attention is jax.nn.dot_product_attention
    np.testing.assert_allclose(train(theirs, theirs.flash, None), wanted, rtol=2e-4)


def on_mesh() -> tuple[Any, Any]:
    """A mesh of 2 × 2 × 2 devices, and attention on it: heads over tensor, the sequence round a ring."""
    mesh = Mesh(np.array(jax.devices("cpu")[:8]).reshape(2, 2, 2), ("data", "tensor", "seq"))
    spec = P("data", "seq", "tensor")
    ring = functools.partial(ring_attention, axis_name="seq", causal=True)
    return mesh, jax.shard_map(lambda q, k, v: ring(q, k, v), mesh=mesh, in_specs=spec, out_specs=spec)


@pytest.mark.parametrize("remat", [False, True])
def test_the_loss_curve_is_that_of_one_device(gpt: Any, wanted: list[float], remat: bool) -> None:
    mesh, attention = on_mesh()
    if remat:
        policy = jax.checkpoint_policies.save_only_these_names("cuattn_out", "cuattn_lse")
        attention = jax.checkpoint(attention, policy=policy)
    losses = train(gpt, attention, mesh)
    np.testing.assert_allclose(losses, wanted, rtol=2e-4)
    assert losses[-1] < losses[0]


def test_resuming_continues_the_curve(gpt: Any, wanted: list[float], tmp_path: Path) -> None:
    """Written on a mesh, read on another layout: the weights in the file are whole."""
    mesh, attention = on_mesh()
    half = STEPS // 2
    before = train(gpt, attention, mesh, tmp_path / "state.npz", half)
    after = train(gpt, gpt.flash, None, tmp_path / "state.npz")
    np.testing.assert_allclose(before + after, wanted, rtol=2e-4)
