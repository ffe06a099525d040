"""``flash_attention`` under ``jit`` on eight CPU devices: each computes its own part, nothing is gathered."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cuattn

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from cuattn.interop.jaxcompat import knows_sharding_rules  # noqa: E402

pytestmark = [
    pytest.mark.skipif(len(jax.devices("cpu")) < 8, reason="needs eight CPU devices"),
    pytest.mark.usefixtures("on_cpu"),
]
attention = functools.partial(cuattn.flash_attention, return_lse=True)
NAMES = ("q", "k", "v", "bias", "sinks")


@pytest.fixture
def mesh() -> Any:
    return Mesh(np.array(jax.devices("cpu")[:8]).reshape(2, 4), ("data", "model"))


@pytest.fixture(params=["shardy", "gspmd"])
def partitioner(request: pytest.FixtureRequest) -> Iterator[str]:
    """JAX's two partitioners."""
    before = getattr(jax.config, "jax_use_shardy_partitioner", None)
    if before is None:
        pytest.skip("this JAX has one partitioner")
    if request.param == "shardy" and not knows_sharding_rules():
        pytest.skip("this JAX cannot tell Shardy what it must know")
    jax.config.update("jax_use_shardy_partitioner", request.param == "shardy")
    yield request.param
    jax.config.update("jax_use_shardy_partitioner", before)


def normal(seed: int, *shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def problem(heads_kv: int = 8, heads: int = 8, batch: int = 4) -> dict[str, Any]:
    return {
        "q": normal(0, batch, 6, heads, 8), "k": normal(1, batch, 7, heads_kv, 8),
        "v": normal(2, batch, 7, heads_kv, 5), "bias": normal(3, 1, heads, 6, 7), "sinks": normal(4, heads),
    }  # fmt: skip


def loss(arrays: dict[str, Any], rest: dict[str, Any], **options: Any) -> Any:
    out, lse = attention(**arrays, **rest, **options)
    return jnp.cos(out).sum() + jnp.where(jnp.isfinite(lse), jnp.sin(lse), 0.0).sum()


def close(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def collectives(compiled: Any) -> set[str]:
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return set(re.findall(rf"\b({names})(?:-start)?\(", compiled.as_text()))


@pytest.mark.parametrize("heads_kv", [8, 4, 2, 1])
def test_batch_and_heads_split_without_gathering(mesh: Any, partitioner: str, heads_kv: int) -> None:
    """Forward moves nothing; backward sums only what several devices hold a part of. Dropout's bits stay."""
    arrays = problem(heads_kv)
    heads = "model" if heads_kv % 4 == 0 else None
    specs = {"q": P("data", None, "model"), "k": P("data", None, heads), "v": P("data", None, heads)}
    specs |= {"bias": P(None, "model"), "sinks": P("model")}
    shardings = {n: NamedSharding(mesh, s) for n, s in specs.items()}
    options = {"causal": True, "dropout_p": 0.3}
    rest = {"dropout_seed": jnp.uint32(7)}
    forward = jax.jit(functools.partial(attention, **options))
    given = {n: jax.device_put(x, shardings[n]) for n, x in arrays.items()}
    assert collectives(forward.lower(**given, **rest).compile()) == set()
    out, lse = forward(**given, **rest)
    assert out.sharding.is_equivalent_to(shardings["q"], 4)
    assert lse.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 3)
    step = jax.jit(jax.value_and_grad(functools.partial(loss, **options)))
    assert collectives(step.lower(given, rest).compile()) == {"all-reduce"}
    got = step(given, rest)
    close(got, step(arrays, rest))
    for name in NAMES:
        assert got[1][name].sharding.is_equivalent_to(shardings[name], arrays[name].ndim), name


def test_every_operand(mesh: Any, partitioner: str) -> None:
    arrays = {n: x for n, x in problem(4).items() if n != "bias"}
    rest = {
        "mask": normal(5, 4, 1, 6, 7) > -1, "alibi_slopes": jnp.abs(normal(6, 4, 8)),
        "q_segment_ids": jnp.arange(24).reshape(4, 6) % 3 // 2,
        "kv_segment_ids": jnp.arange(28).reshape(4, 7) % 3 // 2,
        "q_seqlens": jnp.asarray([6, 3, 0, 5]), "kv_seqlens": jnp.asarray([7, 7, 2, 0]),
        "softmax_scale": jnp.float32(0.4), "q_offset": jnp.asarray([0, 1, 2, 3]),
    }  # fmt: skip
    step = jax.jit(jax.value_and_grad(functools.partial(loss, window_size=(3, 1), softcap=4.0)))
    want = step(arrays, rest)
    put = {n: jax.device_put(x, NamedSharding(mesh, P("data"))) for n, x in arrays.items() if n != "sinks"}
    put["sinks"] = jax.device_put(arrays["sinks"], NamedSharding(mesh, P()))
    close(step(put, rest), want)
    assert "all-gather" not in collectives(step.lower(put, rest).compile())


@pytest.mark.parametrize("layout", ["bhsd", "thd"])
def test_other_layouts(mesh: Any, layout: str) -> None:
    arrays = {n: x for n, x in problem(4).items() if n in "qkv"}
    if layout == "bhsd":
        arrays = {n: x.swapaxes(1, 2) for n, x in arrays.items()}
        run = jax.jit(functools.partial(attention, layout="bhsd", causal=True))
        spec = P("data", "model")
    else:
        arrays = {n: x.reshape(-1, *x.shape[2:]) for n, x in arrays.items()}
        starts = {"cu_seqlens_q": jnp.asarray([0, 10, 24]), "cu_seqlens_k": jnp.asarray([0, 11, 28])}
        run = jax.jit(
            functools.partial(cuattn.flash_attention_varlen, **starts, causal=True, return_lse=True)
        )
        spec = P(None, "model")
    put = {n: jax.device_put(x, NamedSharding(mesh, spec)) for n, x in arrays.items()}
    close(run(**put), run(**arrays))
    assert collectives(run.lower(**put).compile()) == set()


def test_a_sharded_sequence_is_refused_with_advice(mesh: Any, partitioner: str) -> None:
    arrays = {n: normal(i, 2, 8, 4, 8) for i, n in enumerate("qkv")}
    for spec in (P(None, "model"), P("data", ("model",))):
        put = {n: jax.device_put(x, NamedSharding(mesh, spec)) for n, x in arrays.items()}
        with pytest.raises(Exception, match=r"q: got its sequence axis sharded over .*ring_attention"):
            jax.jit(attention)(**put)


def test_a_constraint_gathers_the_sequence(mesh: Any) -> None:
    """Megatron's way: activations split by sequence, by heads inside attention; out goes back."""
    arrays = {n: normal(i, 2, 8, 4, 8) for i, n in enumerate("qkv")}

    def layer(arrays: Any) -> Any:
        inside = {
            n: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data", None, "model")))
            for n, x in arrays.items()
        }
        out = cuattn.flash_attention(**inside, causal=True)
        out = jax.lax.with_sharding_constraint(out, NamedSharding(mesh, P("data", "model")))
        return (out**2).sum()

    put = {n: jax.device_put(x, NamedSharding(mesh, P("data", "model"))) for n, x in arrays.items()}
    step = jax.jit(jax.value_and_grad(layer))
    close(step(put), step(arrays))


def test_scan_and_remat(mesh: Any) -> None:
    arrays = {n: normal(i, 4, 8, 4, 8) for i, n in enumerate("qkv")}

    def run(arrays: Any) -> Any:
        @jax.checkpoint
        def body(q: Any, _: Any) -> Any:
            return jnp.tanh(q + cuattn.flash_attention(q, arrays["k"], arrays["v"], causal=True)), None

        return (jax.lax.scan(body, arrays["q"], None, length=3)[0] ** 2).sum()

    step = jax.jit(jax.value_and_grad(run))
    put = {n: jax.device_put(x, NamedSharding(mesh, P("data", None, "model"))) for n, x in arrays.items()}
    close(step(put), step(arrays))
    assert collectives(step.lower(put).compile()) <= {"all-reduce"}


def test_shard_map(mesh: Any) -> None:
    """Inside shard_map every device calls attention on what it holds."""
    if not hasattr(jax, "shard_map"):
        pytest.skip("an older JAX")
    arrays = problem()
    specs = {"q": P("data", None, "model"), "k": P("data", None, "model"), "v": P("data", None, "model")}
    specs |= {"bias": P(None, "model"), "sinks": P("model")}
    inside = jax.shard_map(
        lambda a: attention(**a, causal=True),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(P("data", None, "model"), P("data", "model")),
    )

    def total(function: Any) -> Any:
        def run(arrays: Any) -> Any:
            out, lse = function(arrays)
            return jnp.cos(out).sum() + jnp.sin(lse).sum()

        return jax.jit(jax.value_and_grad(run))

    close(total(inside)(arrays), total(lambda a: attention(**a, causal=True))(arrays))


@pytest.mark.parametrize("heads_kv", [4, 2])
def test_explicit_meshes(heads_kv: int) -> None:
    """Shardings in types: results carry them, and a sharded sequence is a ValueError while tracing."""
    if not hasattr(jax.sharding, "AxisType") or not hasattr(jax, "set_mesh"):
        pytest.skip("an older JAX")
    devices = np.array(jax.devices("cpu")[:8]).reshape(2, 4)
    mesh = Mesh(devices, ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    arrays = problem(heads_kv)
    run = functools.partial(attention, causal=True, dropout_p=0.2, dropout_seed=3)

    def total(arrays: Any) -> Any:
        return (run(**arrays)[0] ** 2).sum()

    with jax.set_mesh(mesh):
        keys = P("data", None, "model" if heads_kv == 4 else None, None)
        specs = {"q": P("data", None, "model", None), "k": keys, "v": keys}
        specs |= {"bias": P(None, "model", None, None), "sinks": P("model")}
        put = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in arrays.items()}
        out, lse = jax.jit(run)(**put)
        assert jax.typeof(out).sharding.spec == P("data", None, "model", None)
        assert jax.typeof(lse).sharding.spec == P("data", "model", None)
        step = jax.jit(jax.grad(total))
        got = step(put)
        for name, x in got.items():
            assert jax.typeof(x).sharding.spec == specs[name]
        assert collectives(step.lower(put).compile()) == {"all-reduce"}
        wrong = jax.device_put(normal(0, 4, 8, 8, 8), NamedSharding(mesh, P("data", "model", None, None)))
        with pytest.raises(
            ValueError, match=r"q: got its sequence axis sharded over 'model'.*ring_attention"
        ):
            jax.jit(attention)(wrong, wrong, wrong)
    close((out, lse), run(**arrays))
    close(got, jax.jit(jax.grad(total))(arrays))
