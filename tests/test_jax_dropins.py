"""The drop-ins: ``jax.nn.dot_product_attention``'s signature and results, and flax's and Equinox's hooks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from cuattn.interop.jax import attention_fn, dot_product_attention  # noqa: E402

theirs = functools.partial(jax.nn.dot_product_attention, implementation="xla")


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """JAX's own float32 products are rounded to TF32 on a GPU unless told not to."""
    with jax.default_matmul_precision("highest"):
        yield


def normal(seed: int, *shape: int, dtype: Any = np.float32) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def qkv(
    batch: tuple[int, ...] = (2,), heads: int = 4, heads_kv: int = 2, length: int = 6, length_kv: int = 9
) -> Any:
    return (
        normal(0, *batch, length, heads, 8),
        normal(1, *batch, length_kv, heads_kv, 8),
        normal(2, *batch, length_kv, heads_kv, 8),
    )


def close(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=tolerance, atol=tolerance
        )


def test_signature_is_that_of_jax() -> None:
    """Every parameter of the installed JAX's function, with its default and kind."""
    ours = inspect.signature(dot_product_attention).parameters
    for name, parameter in inspect.signature(jax.nn.dot_product_attention).parameters.items():
        assert (ours[name].default, ours[name].kind) == (parameter.default, parameter.kind), name


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "window": {"local_window_size": (3, 1)},
    "symmetric_window": {"local_window_size": 2},
    "causal_window": {"local_window_size": 3, "is_causal": True},
    "mask": {"mask": (normal(3, 2, 1, 6, 9) > -0.5).at[..., 0].set(True)},
    "mask_of_heads": {"mask": (normal(4, 1, 4, 6, 9) > -0.5).at[..., 0].set(True)},
    "lengths": {"key_value_seq_lengths": jnp.asarray([9, 4], jnp.int32)},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("bias", [None, (1, 4, 6, 9), (2, 1, 6, 9), (1, 1, 1, 9)])
def test_results_and_gradients_are_those_of_jax(case: str, bias: Any) -> None:
    options = CASES[case]
    given = dict(zip(("query", "key", "value"), qkv(), strict=True))
    if bias is not None:
        given["bias"] = normal(5, *bias)

    def run(function: Any) -> Any:
        def loss(given: Any) -> Any:
            out = function(**given, **options)
            return (jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape) * out).sum(), out

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(given)

    close(run(dot_product_attention), run(theirs))


def test_query_lengths() -> None:
    """Rows within the lengths are JAX's; those beyond, where JAX gives a mean of values, are 0."""
    q, k, v = qkv()
    lengths = {"query_seq_lengths": jnp.asarray([6, 3]), "key_value_seq_lengths": jnp.asarray([5, 9])}
    got, want = dot_product_attention(q, k, v, **lengths), theirs(q, k, v, **lengths)
    close(got[0], want[0])
    close(got[1, :3], want[1, :3])
    assert not np.any(got[1, 3:])


def test_three_dimensions_and_dtypes() -> None:
    for dtype, tolerance in (("float32", 2e-5), ("bfloat16", 3e-2), ("float16", 4e-3)):
        arrays = [x.astype(dtype) for x in qkv(())]
        bias = normal(5, 4, 6, 9)
        close(dot_product_attention(*arrays, bias), theirs(*arrays, bias), tolerance)
        close(
            dot_product_attention(*arrays, bias.astype("bfloat16")),
            theirs(*arrays, bias.astype("bfloat16")),
            tolerance,
        )


@pytest.mark.skipif(
    "return_residual" not in inspect.signature(jax.nn.dot_product_attention).parameters, reason="an older JAX"
)
def test_residual_is_returned_and_differentiable() -> None:
    for batch in ((2,), ()):
        arrays = qkv(batch)
        close(dot_product_attention(*arrays, return_residual=True), theirs(*arrays, return_residual=True))
    q, k, v = qkv()

    def plain(q: Any, k: Any) -> Any:
        scores = jnp.einsum("btkgh,bskh->btkgs", q.reshape(2, 6, 2, 2, 8), k) * 8**-0.5
        return jnp.sin(jax.nn.logsumexp(scores, -1)).sum()

    def ours(q: Any, k: Any) -> Any:
        return jnp.sin(dot_product_attention(q, k, v, return_residual=True)[1]).sum()

    close(jax.grad(ours, argnums=(0, 1))(q, k), jax.grad(plain, argnums=(0, 1))(q, k))


def test_a_query_without_keys_gives_zero() -> None:
    q, k, v = qkv()
    mask = jnp.ones((1, 1, 6, 9), bool).at[0, 0, 2].set(False)
    out, residual = dot_product_attention(q, k, v, mask=mask, return_residual=True)
    assert not np.any(out[:, 2])
    assert np.all(np.asarray(residual)[:, 2] == -np.inf)
    dirty = v.at[0, 8].set(jnp.nan)
    hidden = jnp.arange(9)[None, None, None] < 8
    assert np.all(np.isfinite(dot_product_attention(q, k, dirty, mask=hidden)))


def test_errors_name_the_argument() -> None:
    q, k, v = qkv()
    for arguments, options, words in (
        ((q, k, v), {"implementation": "triton"}, "implementation"),
        ((q[0], k, v), {}, "key"),
        ((q, k, v, jnp.ones((3, 1, 6, 9))), {}, "bias"),
        ((q, k[:, :, :1].repeat(3, 2), v[:, :, :1].repeat(3, 2)), {}, "key.*3 heads"),
        ((q, k[:1], v[:1]), {}, "key: got batch 1"),
        ((q, k, v), {"key_value_seq_lengths": jnp.ones(3, jnp.int32)}, "key_value_seq_lengths: got shape"),
        ((q, k, v), {"local_window_size": (-3, 1)}, "local_window_size: got"),
        ((q, k, v), {"scale": jnp.ones(2)}, "scale: got"),
    ):
        with pytest.raises(ValueError, match=words):
            dot_product_attention(*arguments, **options)


# ----------------------------------------------------------------------------------------------- libraries
def test_flax_nnx() -> None:
    nnx = pytest.importorskip("flax.nnx")
    x = normal(0, 2, 6, 32)
    mask = nnx.make_causal_mask(jnp.ones((2, 6)))
    layers = [
        nnx.MultiHeadAttention(4, 32, rngs=nnx.Rngs(0), decode=False, **hook)
        for hook in ({}, {"attention_fn": attention_fn})
    ]
    for options in ({}, {"mask": mask}):
        want, got = (layer(x, **options) for layer in layers)
        close(got, want, 1e-5)
    want, got = (nnx.grad(lambda m: (m(x, mask=mask) ** 2).sum())(layer) for layer in layers)
    close(got, want, 1e-4)
    drops = nnx.MultiHeadAttention(
        4,
        32,
        rngs=nnx.Rngs(0),
        decode=False,
        attention_fn=attention_fn,
        dropout_rate=0.5,
        broadcast_dropout=False,
    )
    first = drops(x, rngs=nnx.Rngs(1), deterministic=False)
    close(drops(x, rngs=nnx.Rngs(1), deterministic=False), first)
    assert not np.allclose(drops(x, rngs=nnx.Rngs(2), deterministic=False), first)


def test_flax_linen() -> None:
    linen = pytest.importorskip("flax.linen")
    x = normal(0, 3, 2, 6, 32)
    mask = linen.make_causal_mask(jnp.ones((3, 2, 6)))
    plain, hooked = (
        linen.MultiHeadDotProductAttention(num_heads=4, **hook)
        for hook in ({}, {"attention_fn": attention_fn})
    )
    weights = plain.init(jax.random.key(0), x)
    for options in ({}, {"mask": mask}):
        close(hooked.apply(weights, x, **options), plain.apply(weights, x, **options), 1e-5)
    with pytest.raises(ValueError, match=r"module.*weights"):
        hooked.apply(weights, x, sow_weights=True)
    quantised = linen.MultiHeadDotProductAttention(
        num_heads=4, attention_fn=attention_fn, qk_attn_weights_einsum_cls=lambda: jnp.einsum
    )
    with pytest.raises(ValueError, match="qk_attn_weights_einsum"):
        quantised.apply(weights, x)


def test_flax_hook_refuses_shared_dropout() -> None:
    q, k, v = qkv(heads_kv=4)
    with pytest.raises(ValueError, match="broadcast_dropout"):
        attention_fn(q, k, v, dropout_rate=0.5, dropout_rng=jax.random.key(0))
    with pytest.raises(ValueError, match="dropout_rng"):
        attention_fn(q, k, v, dropout_rate=0.5, broadcast_dropout=False)


def test_equinox_module() -> None:
    """Our attention inside an Equinox module, under its filtered jit and grad."""
    eqx = pytest.importorskip("equinox")

    class Attention(eqx.Module):
        qkv: Any
        out: Any
        heads: int = eqx.field(static=True)

        def __call__(self, x: Any, attend: Any) -> Any:
            q, k, v = jnp.split(jax.vmap(self.qkv)(x).reshape(x.shape[0], self.heads, -1), 3, -1)
            return jax.vmap(self.out)(attend(q, k, v, is_causal=True).reshape(x.shape[0], -1))

    keys = jax.random.split(jax.random.key(0))
    layer = Attention(eqx.nn.Linear(32, 96, key=keys[0]), eqx.nn.Linear(32, 32, key=keys[1]), 4)
    x = normal(0, 5, 6, 32)

    def run(attend: Any) -> Any:
        @eqx.filter_jit
        @eqx.filter_value_and_grad
        def loss(layer: Any, x: Any) -> Any:
            return (jax.vmap(layer, (0, None))(x, attend) ** 2).sum()

        return loss(layer, x)

    close(run(dot_product_attention), run(theirs), 1e-4)
