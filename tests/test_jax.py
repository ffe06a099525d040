"""``flash_attention`` under JAX's transformations, against plain attention written in jnp."""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np
import pytest

import cuattn

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from cuattn.interop import xla_ffi  # noqa: E402

try:
    from jax.extend.core import jaxprs_in_params
except ImportError:  # an older JAX
    from jax.core import jaxprs_in_params

NAMES = ("q", "k", "v", "bias", "sinks")
attention = functools.partial(cuattn.flash_attention, return_lse=True)


def plain(
    q: Any, k: Any, v: Any, *, causal: bool = False, softmax_scale: Any = None, softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None, alibi_slopes: Any = None, sinks: Any = None, q_segment_ids: Any = None,
    kv_segment_ids: Any = None, q_seqlens: Any = None, kv_seqlens: Any = None, q_offset: Any = None,
    window_size: Any = None,
) -> Any:  # fmt: skip
    """(out, lse) with layout bshd, in q's dtype or float32, differentiable by JAX itself."""
    batch, seqlen_q, heads, dim = q.shape
    seqlen_kv, group = k.shape[1], heads // k.shape[2]
    k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    scores = scale * jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest")
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    q_len = jnp.full(batch, seqlen_q) if q_seqlens is None else q_seqlens
    kv_len = jnp.full(batch, seqlen_kv) if kv_seqlens is None else kv_seqlens
    offset = jnp.broadcast_to(kv_len - q_len if q_offset is None else q_offset, (batch,))
    rows, columns = jnp.arange(seqlen_q)[None, :, None], jnp.arange(seqlen_kv)[None, None, :]
    distance = (columns - rows - offset[:, None, None])[:, None]
    seen = ((rows < q_len[:, None, None]) & (columns < kv_len[:, None, None]))[:, None]
    if bias is not None:
        scores = scores + bias
    if alibi_slopes is not None:
        scores = scores - jnp.atleast_2d(alibi_slopes)[:, :, None, None] * jnp.abs(distance)
    left, right = window_size or (-1, -1)
    if causal or right >= 0:
        seen = seen & (distance <= (0 if causal else right))
    if left >= 0:
        seen = seen & (-distance <= left)
    if mask is not None:
        seen = seen & mask
    if q_segment_ids is not None:
        seen = seen & (q_segment_ids[:, None, :, None] == kv_segment_ids[:, None, None, :])
    live = seen.any(-1)
    scores = jnp.where(seen, scores, -1e30)
    lse = jax.nn.logsumexp(scores, -1)
    if sinks is not None:
        lse = jnp.logaddexp(lse, sinks[None, :, None])
    weights = jnp.where(seen, jnp.exp(scores - lse[..., None]), 0.0)
    live = jnp.broadcast_to(live, lse.shape)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v, precision="highest"), jnp.where(live, lse, -jnp.inf)


def normal(seed: int, *shape: int, dtype: Any = np.float32) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def problem(
    batch: int = 2, seqlen_q: int = 5, seqlen_kv: int = 7, heads: int = 4, heads_kv: int = 2
) -> dict[str, Any]:
    return {
        "q": normal(0, batch, seqlen_q, heads, 8),
        "k": normal(1, batch, seqlen_kv, heads_kv, 8),
        "v": normal(2, batch, seqlen_kv, heads_kv, 6),
        "bias": normal(3, 1, heads, seqlen_q, seqlen_kv),
        "sinks": normal(4, heads),
    }


def weighted(function: Any, **options: Any) -> Any:
    """A scalar that depends on every element of out and LSE."""

    def loss(*values: Any) -> Any:
        out, lse = function(**dict(zip(NAMES, values, strict=False)), **options)
        weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return (weights * out).sum() + jnp.where(jnp.isfinite(lse), jnp.sin(lse), 0.0).sum()

    return loss


def close(got: Any, want: Any, atol: float = 2e-5) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=1e-4, atol=atol)


def primitives(jaxpr: Any) -> list[str]:
    """Names of all our primitives in a jaxpr, nested ones included."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name.startswith("cuattn"):
            found.append(equation.primitive.name)
        for sub in jaxprs_in_params(equation.params):
            found += primitives(sub)
    return found


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "remat"])
def test_values_and_gradients(wrap: Any) -> None:
    values = tuple(problem().values())
    ours, theirs = weighted(attention, causal=True), weighted(plain, causal=True)
    close(wrap(ours)(*values), theirs(*values))
    got = wrap(jax.value_and_grad(ours, argnums=range(5)))(*values)
    close(got, jax.value_and_grad(theirs, argnums=range(5))(*values))


FEATURES: dict[str, dict[str, Any]] = {
    "window": {"window_size": (3, 1)},
    "softcap": {"softcap": 2.0, "causal": True},
    "mask": {"mask": normal(5, 2, 1, 5, 7) > 0},
    "mask_rows": {"mask": normal(5, 5, 1) > 0},
    "alibi": {"alibi_slopes": jnp.abs(normal(6, 4))},
    "alibi_batch": {"alibi_slopes": jnp.abs(normal(6, 2, 4)), "causal": True},
    "segments": {
        "q_segment_ids": jnp.asarray([[0, 0, 1, 1, 2], [0, 1, 1, 1, 3]]),
        "kv_segment_ids": jnp.asarray([[0, 0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 0, 2, 2]]),
    },
    "lengths": {"q_seqlens": jnp.asarray([3, 5]), "kv_seqlens": jnp.asarray([7, 2]), "causal": True},
    "offsets": {"q_offset": jnp.asarray([1, -2]), "causal": True},
    "top_left": {"q_offset": 0, "causal": True},
}


@pytest.mark.parametrize("name", FEATURES)
def test_features(name: str) -> None:
    """Every operand of the contract, as an array under jit, with every gradient."""
    options = FEATURES[name]
    static = {n: x for n, x in options.items() if not isinstance(x, jax.Array)}
    arrays = {n: x for n, x in options.items() if isinstance(x, jax.Array)}

    def run(function: Any) -> Any:
        def loss(values: Any, arrays: Any) -> Any:
            return weighted(function, **static, **arrays)(*values)

        return jax.jit(jax.value_and_grad(loss))(tuple(problem().values()), arrays)

    close(run(attention), run(plain))


# operand -> (shape of one problem's, axes over which to map it)
MAPPED: dict[str, dict[str, Any]] = {
    "q": {"q": 0},
    "k": {"k": 2},
    "qv": {"q": 1, "v": 4},
    "qkv_last": {"q": 4, "k": 4, "v": 4},
    "all": {"q": 0, "k": 0, "v": 0, "bias": 0, "sinks": 0},
    "bias": {"bias": 2},
    "sinks": {"sinks": 1},
    "bias_sinks_q": {"q": 3, "bias": 4, "sinks": 0},
}


def spread(arrays: dict[str, Any], axes: dict[str, int], n: int = 3) -> dict[str, Any]:
    """n different copies of each mapped operand along its axis."""
    return {
        name: jnp.stack([x * (1 + 0.3 * i) for i in range(n)], axes[name]) if name in axes else x
        for name, x in arrays.items()
    }


def loop(function: Any, arrays: dict[str, Any], axes: dict[str, int], n: int = 3) -> Any:
    one = [
        function(*(jnp.take(x, i, axes[name]) if name in axes else x for name, x in arrays.items()))
        for i in range(n)
    ]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *one)


@pytest.mark.parametrize("case", MAPPED)
@pytest.mark.parametrize("bias_batch", [1, 2])
def test_vmap(case: str, bias_batch: int) -> None:
    """vmap and vmap of grad equal the loop; grad of vmap equals the gradient of the sum."""
    axes = MAPPED[case]
    arrays = spread({**problem(), "bias": normal(3, bias_batch, 4, 5, 7)}, axes)
    in_axes = tuple(axes.get(name) for name in NAMES)
    ours, theirs = weighted(attention, causal=True), weighted(plain, causal=True)
    close(jax.jit(jax.vmap(ours, in_axes))(*arrays.values()), loop(theirs, arrays, axes))
    grad = functools.partial(jax.grad, argnums=range(5))
    close(jax.jit(jax.vmap(grad(ours), in_axes))(*arrays.values()), loop(grad(theirs), arrays, axes))
    total = [lambda *a, f=f: jax.vmap(f, in_axes)(*a).sum() for f in (ours, theirs)]
    close(jax.jit(grad(total[0]))(*arrays.values()), grad(total[1])(*arrays.values()), atol=1e-4)


def test_vmap_of_small_operands() -> None:
    """Lengths, offsets, segments, slopes and scale may each be mapped or not."""
    arrays = [problem()[n] for n in "qkv"]
    small = {
        "kv_seqlens": jnp.asarray([[7, 3], [1, 0], [5, 6]]),
        "q_offset": jnp.asarray([[0, 1], [2, 3], [-1, 0]]),
        "alibi_slopes": jnp.abs(normal(7, 3, 4)),
        "softmax_scale": jnp.asarray([0.1, 0.5, 1.0]),
        "mask": normal(8, 3, 5, 7) > 0,
    }
    for name, x in small.items():

        def run(function: Any, x: Any, name: str = name) -> Any:
            return function(*arrays, causal=True, **{name: x})

        got = jax.vmap(functools.partial(run, attention))(x)
        close(got, jax.vmap(functools.partial(run, plain))(x))


def test_nested_vmap() -> None:
    q, k, v = normal(0, 2, 3, 2, 5, 4, 8), normal(1, 3, 2, 7, 2, 8), normal(2, 2, 2, 7, 2, 8)
    got, want = (
        jax.vmap(jax.vmap(lambda q, k, v, f=f: f(q, k, v, causal=True), (0, 0, None)), (0, None, 0))(q, k, v)
        for f in (attention, plain)
    )
    close(got, want)


def test_scan_and_cond() -> None:
    arrays = problem(seqlen_q=7, heads_kv=4)
    k, v = arrays["k"], normal(2, 2, 7, 4, 8)

    def steps(function: Any) -> Any:
        def body(x: Any, flag: Any) -> Any:
            attended = jax.lax.cond(
                flag, lambda x: function(x, k, v, causal=True)[0], lambda x: function(x, k, v)[0], x
            )
            return jnp.tanh(x + attended), attended.sum()

        def run(q: Any) -> Any:
            q, sums = jax.lax.scan(body, q, jnp.asarray([True, False, True]))
            return (q**2).sum() + sums.sum()

        return jax.jit(jax.value_and_grad(run))

    q = normal(0, 2, 7, 4, 8)
    close(steps(attention)(q), steps(plain)(q))


def test_checkpoint_policy_keeps_out_and_lse() -> None:
    """Under a policy that saves them by name, a checkpointed layer runs its forward once."""
    values = tuple(problem().values())
    policy = jax.checkpoint_policies.save_only_these_names("cuattn_out", "cuattn_lse")
    loss = weighted(attention, causal=True)
    grads = {p: jax.grad(jax.checkpoint(loss, policy=p), argnums=range(5)) for p in (policy, None)}
    counts = {
        p: primitives(jax.make_jaxpr(f)(*values).jaxpr).count("cuattn_forward") for p, f in grads.items()
    }
    assert counts == {policy: 1, None: 2}
    close(jax.jit(grads[policy])(*values), jax.grad(weighted(plain, causal=True), argnums=range(5))(*values))

    def layers(policy: Any, q: Any) -> Any:
        layer = jax.checkpoint(
            lambda q, _: (jnp.tanh(q + attention(q, q, q, causal=True)[0]), None), policy=policy
        )
        return (jax.lax.scan(layer, q, None, length=3)[0] ** 2).sum()

    q = normal(0, 2, 5, 4, 8)
    for p, count in ((policy, 2 * 3), (None, 3 * 3)):  # what the handlers run for three layers
        before = xla_ffi.calls()
        jax.block_until_ready(jax.jit(jax.grad(functools.partial(layers, p)))(q))
        assert xla_ffi.calls() - before == count


def backward_parameters(function: Any, *args: Any) -> dict[str, Any]:
    """Parameters of the only backward call in a function's jaxpr."""
    equations = jax.make_jaxpr(function)(*args).jaxpr.eqns
    (found,) = [e.params for e in equations if e.primitive.name == "cuattn_backward"]
    return found


@pytest.mark.parametrize(
    "wants", [("q",), ("k",), ("v",), ("bias",), ("sinks",), ("q", "bias"), ("k", "v", "sinks")]
)
def test_only_asked_gradients(wants: tuple[str, ...]) -> None:
    """The backward pass computes what is asked, and takes no LSE gradient where LSE was not used."""
    arrays = problem()

    def loss(function: Any) -> Any:
        return lambda given: (function(**{**arrays, **given}, causal=True)[0] ** 2).sum()

    given = {name: arrays[name] for name in wants}
    found = backward_parameters(jax.grad(loss(attention)), given)
    assert set(found["wants"]) == set(wants)
    assert not found["dlse"]
    close(jax.grad(loss(attention))(given), jax.grad(loss(plain))(given))


def test_lse_alone_is_differentiable() -> None:
    arrays = {n: x for n, x in problem().items() if n in "qkv"}
    got, want = (jax.grad(lambda a, f=f: jnp.sin(f(**a)[1]).sum())(arrays) for f in (attention, plain))
    close(got, want)
    assert not np.any(np.asarray(got["v"]))


def test_jacrev() -> None:
    q, k, v = normal(0, 1, 2, 1, 4), normal(1, 1, 3, 1, 4), normal(2, 1, 3, 1, 4)
    got, want = (jax.jacrev(lambda q, f=f: f(q, k, v)[0])(q) for f in (attention, plain))
    close(got, want)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_forward_mode_and_second_derivatives_say_what_to_use(wrap: Any) -> None:
    q = problem()["q"]
    k, v = normal(1, 2, 5, 4, 8), normal(2, 2, 5, 4, 8)
    loss = wrap(lambda q: attention(q, k, v)[0].sum())
    with pytest.raises(NotImplementedError, match=r"jax\.grad, jax\.vjp or jax\.jacrev"):
        jax.jvp(loss, (q,), (q,))
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        jax.grad(lambda q: (jax.grad(loss)(q) ** 2).sum())(q)


def test_traced_scale_lengths_offsets_and_seed_do_not_recompile() -> None:
    arrays = problem()

    @jax.jit
    def run(scale: Any, lengths: Any, offset: Any, seed: Any, sinks: Any) -> Any:
        return attention(
            *(arrays[n] for n in "qkv"), causal=True, softmax_scale=scale, kv_seqlens=lengths,
            q_offset=offset,
            sinks=sinks, dropout_p=0.25, dropout_seed=seed,
        )  # fmt: skip

    results = []
    for i in range(3):
        results.append(
            run(jnp.float32(0.3 + i), jnp.asarray([7 - i, 3]), jnp.asarray(i), jnp.uint32(i), normal(i, 4))
        )
    assert run._cache_size() == 1
    step = jax.jit(jax.grad(lambda *given: run(*given)[0].sum(), argnums=(0, 4)))
    for i in range(3):
        step(jnp.float32(i + 1), jnp.asarray([7, i]), jnp.asarray(i), jnp.uint32(i), normal(i, 4))
    assert step._cache_size() == 1
    fixed = attention(
        *(np.asarray(arrays[n]) for n in "qkv"), causal=True, softmax_scale=2.3,
        kv_seqlens=np.asarray([5, 3]), q_offset=2,
        sinks=np.asarray(normal(2, 4)), dropout_p=0.25, dropout_seed=2, backend="reference",
    )  # fmt: skip
    close(results[2], fixed)


def test_gradient_of_the_scale() -> None:
    q, k, v = (problem()[n] for n in "qkv")
    got, want = (
        jax.grad(lambda s, f=f: weighted(f, causal=True, softcap=3.0, softmax_scale=s)(q, k, v))(
            jnp.float32(0.7)
        )
        for f in (attention, plain)
    )
    close(got, want)


def test_slopes_are_not_differentiable() -> None:
    q, k, v = (problem()[n] for n in "qkv")
    slopes = jnp.ones(4)
    with pytest.raises(NotImplementedError, match=r"alibi_slopes.*stop_gradient"):
        jax.grad(lambda s: attention(q, k, v, alibi_slopes=s)[0].sum())(slopes)


def test_dropout_is_the_same_everywhere() -> None:
    """One mask in forward and backward, eager and jit, for a seed of any kind, and for each mapped entry."""
    q, k, v = (problem()[n] for n in "qkv")
    run = functools.partial(attention, q, k, v, dropout_p=0.5)
    want = cuattn.flash_attention(
        *map(np.asarray, (q, k, v)), dropout_p=0.5, dropout_seed=7, backend="reference"
    )
    for seed in (7, jnp.uint32(7), jnp.int32(7), np.int64(7)):
        close(run(dropout_seed=seed)[0], want)
    close(jax.jit(lambda s: run(dropout_seed=s))(jnp.uint32(7))[0], want)
    negative = cuattn.flash_attention(
        *map(np.asarray, (q, k, v)), dropout_p=0.5, dropout_seed=-3, backend="reference"
    )
    for seed in (-3, jnp.int32(-3), (1 << 64) - 3):
        close(run(dropout_seed=seed)[0], negative)
    mapped = jax.vmap(lambda q, s: attention(q, k, v, dropout_p=0.5, dropout_seed=s)[0])(
        jnp.stack([q, q]), jnp.asarray([7, 8], jnp.uint32)
    )
    close(mapped[0], want)
    direction = jnp.ones_like(q)
    value, grad = jax.value_and_grad(lambda q: (run_q(q, k, v) ** 2).sum())(q)
    step = 1e-2
    ahead, behind = ((run_q(q + s * direction, k, v) ** 2).sum() for s in (step, -step))
    assert float(grad.sum()) == pytest.approx(float(ahead - behind) / (2 * step), rel=2e-2)
    assert np.isfinite(value)


def run_q(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, dropout_p=0.5, dropout_seed=7)[0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_dtypes_and_layouts(dtype: str, layout: str) -> None:
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        values = [x.astype(dtype) for x in problem().values()]
        values[4] = values[4].astype("float64" if dtype == "float64" else "float32")
        wide = [x.astype("float64") for x in values]
        flip = (lambda x: x.swapaxes(1, 2)) if layout == "bhsd" else (lambda x: x)

        def ours(*values: Any) -> Any:
            arrays = dict(zip(NAMES, values, strict=True))
            moved = {n: flip(x) if n in "qkv" else x for n, x in arrays.items()}
            out, lse = attention(**moved, causal=True, layout=layout)
            assert out.dtype == dtype
            assert lse.dtype == ("float64" if dtype == "float64" else "float32")
            return (flip(out).astype("float64") ** 2).sum() + jnp.sin(lse).sum().astype("float64")

        def theirs(*values: Any) -> Any:
            out, lse = plain(**dict(zip(NAMES, values, strict=True)), causal=True)
            return (out**2).sum() + jnp.sin(lse).sum()

        got = jax.value_and_grad(ours, argnums=range(5))(*values)
        want = jax.value_and_grad(theirs, argnums=range(5))(*wide)
        assert [g.dtype for g in got[1]] == [x.dtype for x in values]
        bar = {"float16": 2e-2, "bfloat16": 2e-1, "float32": 1e-4, "float64": 1e-12}[dtype]
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=bar, atol=bar)


def test_small_operands_of_64_bits() -> None:
    """Under jax_enable_x64, where integers are int64 and a Python float's array float64."""
    arrays = {n: np.asarray(x) for n, x in problem().items()}
    small = {"kv_seqlens": np.array([7, 3]), "q_offset": np.array([0, 1]), "dropout_seed": np.int64(-7)}
    want = cuattn.flash_attention(
        **arrays, **small, causal=True, softmax_scale=0.4, dropout_p=0.25, backend="reference"
    )
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        given = {n: jnp.asarray(x) for n, x in {**arrays, **small, "softmax_scale": 0.4}.items()}
        assert given["kv_seqlens"].dtype == "int64"
        assert given["softmax_scale"].dtype == "float64"
        out, lse = jax.jit(functools.partial(attention, causal=True, dropout_p=0.25))(**given)
        assert (out.dtype, lse.dtype) == ("float32", "float32")
        close(out, want)


@pytest.mark.parametrize("shape", [(0, 5, 7), (2, 0, 7), (2, 5, 0), (1, 1, 1)])
def test_sizes_zero_and_one(shape: tuple[int, int, int]) -> None:
    arrays = problem(*shape)
    out, lse = jax.jit(functools.partial(attention, causal=True))(**arrays)
    assert out.shape == (*shape[:2], 4, 6)
    assert lse.shape == (shape[0], 4, shape[1])
    if shape[2] == 0:
        assert not np.any(out)
        assert np.all(np.asarray(lse) == -np.inf)
    grads = jax.jit(jax.grad(weighted(attention, causal=True), argnums=range(5)))(*arrays.values())
    for g, x in zip(grads, arrays.values(), strict=True):
        assert g.shape == x.shape
        assert np.all(np.isfinite(g))


def test_hidden_nan_changes_nothing() -> None:
    """With jax_debug_nans on: empty rows and hidden NaN give finite values and zero gradients."""
    q, k, v = normal(0, 2, 5, 4, 8), normal(1, 2, 7, 2, 8), normal(2, 2, 7, 2, 6)
    lengths = jnp.asarray([3, 0])
    dirty = [x.at[0, 3:].set(jnp.nan).at[1].set(jnp.inf) for x in (k, v)]

    def run(k: Any, v: Any) -> Any:
        return jax.value_and_grad(
            lambda *a: (attention(*a, kv_seqlens=lengths)[0] ** 2).sum(), argnums=(0, 1, 2)
        )(q, k, v)

    for wrap in (lambda f: f, jax.jit):
        clean = wrap(run)(k, v)
        with jax.debug_nans(True):
            found = wrap(run)(*dirty)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(clean), strict=True):
            np.testing.assert_array_equal(a, b)


def test_disable_jit_and_default_device() -> None:
    values = tuple(problem().values())
    want = weighted(plain)(*values)
    with jax.disable_jit():
        close(weighted(attention)(*values), want)
        close(jax.grad(weighted(attention))(*values), jax.grad(weighted(plain))(*values))
    with jax.default_device(jax.devices("cpu")[-1]):
        here = tuple(jnp.asarray(np.asarray(x)) for x in values)
        out, _ = attention(**dict(zip(NAMES, here, strict=True)))
        assert out.devices() == {jax.devices("cpu")[-1]}
        close(weighted(attention)(*here), want)


def test_donated_buffers() -> None:
    q, k, v = normal(0, 2, 5, 4, 8), normal(1, 2, 5, 4, 8), normal(2, 2, 5, 4, 8)
    want = plain(q, k, v)[0]
    close(jax.jit(lambda q, k, v: attention(q, k, v)[0], donate_argnums=0)(q + 0, k, v), want)


def test_many_threads() -> None:
    values = tuple(problem().values())
    step = jax.jit(jax.value_and_grad(weighted(attention, causal=True), argnums=range(5)))
    want = jax.value_and_grad(weighted(plain, causal=True), argnums=range(5))(*values)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                close(step(*values), want)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_vjp_function_on_jax_arrays() -> None:
    arrays = problem()
    (out, lse), pullback = cuattn.flash_attention_vjp(**arrays, causal=True, return_lse=True)
    (want_out, want_lse), want = jax.vjp(lambda a: plain(**a, causal=True), arrays)
    close((out, lse), (want_out, want_lse))
    dout, dlse = normal(8, *out.shape), normal(9, *lse.shape)
    found = pullback(dout, dlse)
    close({n: getattr(found, f"d{n}") for n in NAMES}, want((dout, dlse))[0])
    only = pullback(None, dlse, wants=("k",))
    assert only.dq is None
    close(only.dk, want((jnp.zeros_like(dout), dlse))[0]["k"])


def test_reference_backend_under_jit() -> None:
    values = tuple(problem().values())
    ours = weighted(functools.partial(attention, backend="reference"), causal=True)
    got = jax.jit(jax.value_and_grad(ours, argnums=range(5)))(*values)
    close(got, jax.value_and_grad(weighted(plain, causal=True), argnums=range(5))(*values))


def test_errors_name_the_argument() -> None:
    q, k, v = (problem()[n] for n in "qkv")
    for options, kind, words in (
        ({"mask": jnp.ones((5, 7))}, TypeError, "mask.*float32.*bool"),
        ({"bias": jnp.ones((3, 7))}, ValueError, "bias.*shape"),
        ({"kv_seqlens": jnp.ones(2)}, TypeError, "kv_seqlens.*integer"),
        ({"kv_seqlens": jnp.ones(3, jnp.int32)}, ValueError, "kv_seqlens"),
        ({"dropout_p": 0.5}, ValueError, "dropout_seed"),
        ({"dropout_p": 0.5, "dropout_seed": jnp.float32(1)}, TypeError, "dropout_seed"),
        ({"sinks": jnp.ones(3)}, ValueError, "sinks"),
        ({"softmax_scale": jnp.ones(2)}, ValueError, "softmax_scale"),
        ({"backend": "triton"}, ValueError, "backend.*triton"),
        ({"layout": "sbhd"}, ValueError, "layout"),
        ({"sinks": object()}, TypeError, "sinks.*object"),
    ):
        with pytest.raises(kind, match=words):
            jax.jit(lambda q, options=options: attention(q, k, v, **options))(q)
    with pytest.raises(TypeError, match=r"k.*float16"):
        attention(q, k.astype("float16"), v)
    if jax.default_backend() == "cpu":
        with pytest.raises(ValueError, match=r"backend.*'cuda' with arrays on cpu"):
            attention(q, k, v, backend="cuda")


def test_packed_sequences() -> None:
    lengths_q, lengths_k = [3, 0, 4], [5, 2, 1]
    q, k, v = normal(0, 7, 4, 8), normal(1, 8, 2, 8), normal(2, 8, 2, 6)
    starts_q, starts_k = (jnp.asarray(np.cumsum([0, *x]), jnp.int32) for x in (lengths_q, lengths_k))

    @jax.jit
    def packed(q: Any, k: Any, v: Any) -> Any:
        return cuattn.flash_attention_varlen(
            q, k, v, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, max_seqlen_q=4, max_seqlen_k=5,
            causal=True, return_lse=True,
        )  # fmt: skip

    def apart(q: Any, k: Any, v: Any) -> Any:
        found = []
        for b in range(3):
            rows, keys = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
            if lengths_q[b]:
                out, lse = plain(q[None, rows], k[None, keys], v[None, keys], causal=True)
                found.append((out[0], lse[0]))
        return jnp.concatenate([o for o, _ in found]), jnp.concatenate([x for _, x in found], 1)

    def loss(function: Any) -> Any:
        def run(*a: Any) -> Any:
            out, lse = function(*a)
            return (out**2).sum() + jnp.where(jnp.isfinite(lse), jnp.sin(lse), 0.0).sum()

        return run

    close(packed(q, k, v), apart(q, k, v))
    got, want = (jax.grad(loss(f), argnums=(0, 1, 2))(q, k, v) for f in (packed, apart))
    close(got, want)
