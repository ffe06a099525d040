"""Ring and Ulysses attention on eight CPU devices: equal to one device, gradients and dropout's bits too."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import cuattn

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from cuattn.interop import jax_parallel  # noqa: E402
from cuattn.interop.jax import ring_attention, ulysses_attention, zigzag_order  # noqa: E402

pytestmark = [
    pytest.mark.skipif(
        len(jax.devices("cpu")) < 8 or not hasattr(jax, "shard_map"),
        reason="needs eight CPU devices and jax.shard_map",
    ),
    pytest.mark.usefixtures("on_cpu"),
]
DIFFERENTIATED = ("q", "k", "v", "sinks", "softmax_scale")
ROWS = ("q", "k", "v", "q_segment_ids", "kv_segment_ids")  # operands that the sequence's axis splits


def normal(seed: int, *shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def problem(seqlen: int = 64, heads: int = 4, heads_kv: int = 2) -> dict[str, Any]:
    return {
        n: normal(i, 2, seqlen, h, 8)
        for i, (n, h) in enumerate(zip("qkv", (heads, heads_kv, heads_kv), strict=True))
    }


def loss(function: Any, arrays: Any, rest: Any, **options: Any) -> Any:
    out, lse = function(**arrays, **rest, **options, return_lse=True)
    weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
    return (weights * out).sum() + jnp.where(jnp.isfinite(lse), jnp.sin(lse), 0.0).sum(), (out, lse)


def across(function: Any, size: int, zigzag: bool = False, check: bool = True, **fixed: Any) -> Any:
    """A function of whole arrays that runs ``function`` split over ``size`` devices."""
    mesh = Mesh(np.array(jax.devices("cpu")[:size]), ("seq",))

    def run(*, return_lse: bool = True, **arrays: Any) -> Any:
        axis = 2 if fixed.get("layout") == "bhsd" else 1
        options = {n: x for n, x in arrays.items() if not isinstance(x, jax.Array)}
        arrays = {n: x for n, x in arrays.items() if isinstance(x, jax.Array)}
        place = {n: axis if n in ("q", "k", "v") else 1 for n in ROWS}
        if zigzag:
            order = zigzag_order(arrays["q"].shape[axis], size)
            arrays = {n: jnp.take(x, order, place[n]) if n in ROWS else x for n, x in arrays.items()}
            options["zigzag"] = True
        specs = {n: P(*(None,) * place[n], "seq") if n in ROWS else P() for n in arrays}
        out = jax.shard_map(
            lambda a: function(**a, **options, **fixed, axis_name="seq", return_lse=True), mesh=mesh,
            in_specs=(specs,), out_specs=(P(*(None,) * axis, "seq"), P(None, None, "seq")), check_vma=check,
        )(arrays)  # fmt: skip
        if zigzag:
            back = np.argsort(order)
            out = jnp.take(out[0], back, axis), jnp.take(out[1], back, 2)
        return out

    return run


def compare(
    function: Any,
    arrays: dict[str, Any],
    size: int = 8,
    zigzag: bool = False,
    check: bool = True,
    **options: Any,
) -> Any:
    given = {n: x for n, x in arrays.items() if n in DIFFERENTIATED}
    rest = {n: x for n, x in arrays.items() if n not in DIFFERENTIATED}
    extra = {"layout": options["layout"]} if "layout" in options else {}
    split = across(function, size, zigzag, check, **extra)
    inner = {n: x for n, x in options.items() if n != "layout"}
    got_step = jax.jit(jax.value_and_grad(functools.partial(loss, split, **inner), has_aux=True))
    one = functools.partial(cuattn.flash_attention, **({"q_offset": 0} | options))
    want = jax.jit(jax.value_and_grad(functools.partial(loss, one), has_aux=True))(given, rest)
    got = got_step(given, rest)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
    return got_step.lower(given, rest)


SEGMENTS = jnp.asarray(np.sort(np.random.default_rng(9).integers(0, 5, (2, 64)), 1))
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "causal": ({}, {"causal": True}),
    "softcap_scale": ({"softmax_scale": jnp.float32(0.5)}, {"softcap": 3.0, "causal": True}),
    "sinks": ({"sinks": normal(4, 4)}, {"causal": True}),
    "segments": ({"q_segment_ids": SEGMENTS, "kv_segment_ids": SEGMENTS}, {"causal": True}),
    "alibi": ({"alibi_slopes": jnp.abs(normal(5, 4))}, {}),
    "window": ({}, {"window_size": (11, 0), "causal": True}),
    "window_both": ({"sinks": normal(4, 4)}, {"window_size": (9, 20)}),
}


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_ring(case: str, zigzag: bool) -> None:
    arrays, options = CASES[case]
    compare(ring_attention, {**problem(), **arrays}, 4 if zigzag else 8, zigzag, **options)


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_dropout_draws_the_bits_of_one_device(zigzag: bool, causal: bool) -> None:
    arrays = {**problem(256), "dropout_seed": jnp.uint32(11)}
    compare(ring_attention, arrays, 4, zigzag, causal=causal, dropout_p=0.4)


def test_other_layout_and_unchecked_axes() -> None:
    arrays = {n: x.swapaxes(1, 2) for n, x in problem().items()}
    compare(ring_attention, arrays, 4, True, check=False, causal=True, layout="bhsd")
    compare(ulysses_attention, arrays, 2, check=False, causal=True, layout="bhsd")


@pytest.mark.parametrize("case", ["segments", "alibi_sinks_scale", "dropout"])
def test_a_long_sequence_goes_round_in_turns(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few batch entries and heads at a time, in a loop: the same results, and dropout's bits."""
    monkeypatch.setattr(jax_parallel, "TURN_BYTES", 1)
    extra: dict[str, Any] = {
        "segments": {"q_segment_ids": SEGMENTS, "kv_segment_ids": SEGMENTS, "layout": "bhsd"},
        "alibi_sinks_scale": {
            "alibi_slopes": jnp.abs(normal(5, 2, 4)), "sinks": normal(4, 4), "softmax_scale": jnp.float32(0.5)
        },
        "dropout": {"dropout_seed": jnp.uint32(11), "dropout_p": 0.4},
    }[case]  # fmt: skip
    arrays = problem(256 if case == "dropout" else 64)
    if "layout" in extra:
        arrays = {n: x.swapaxes(1, 2) for n, x in arrays.items()}
    options = {n: extra.pop(n) for n in ("layout", "dropout_p") if n in extra}
    lowered = compare(ring_attention, arrays | extra, 4, case != "alibi_sinks_scale", causal=True, **options)
    assert lowered.as_text().count("stablehlo.while") == 2


def test_a_window_visits_only_its_neighbours() -> None:
    """Transfers in the program: as many hops as the window reaches."""
    arrays = problem()
    count = {}
    for window in (None, (8, 0)):
        lowered = compare(ring_attention, arrays, 8, window_size=window, causal=True)
        count[window] = lowered.as_text().count("collective_permute")
    hops = {None: 7, (8, 0): 1}
    for window, n in hops.items():  # k with v, forward and backward; their gradients home
        assert count[window] == 3 * n


@pytest.mark.parametrize("heads_kv", [8, 4, 2])
def test_ulysses(heads_kv: int) -> None:
    arrays = problem(32, 8, heads_kv)
    arrays |= {"sinks": normal(4, 8), "q_segment_ids": SEGMENTS[:, :32], "kv_segment_ids": SEGMENTS[:, :32]}
    compare(ulysses_attention, arrays, 4, causal=True, window_size=(20, None))


def test_ulysses_dropout_and_slopes() -> None:
    arrays = {**problem(40, 8, 8), "dropout_seed": jnp.uint32(3), "alibi_slopes": jnp.abs(normal(5, 8))}
    compare(ulysses_attention, arrays, 8, causal=True, dropout_p=0.3)


def test_a_mesh_of_batch_heads_and_sequence() -> None:
    """Dropout's bits too are those of the whole, whatever splits it."""
    mesh = Mesh(np.array(jax.devices("cpu")[:8]).reshape(2, 2, 2), ("data", "model", "seq"))
    arrays = {n: normal(i, 2, 128, 4, 8) for i, n in enumerate("qkv")}
    options = {"causal": True, "dropout_p": 0.5, "dropout_seed": 5}
    spec = P("data", "seq", "model")
    want = cuattn.flash_attention(**arrays, **options)
    for function in (ring_attention, ulysses_attention):
        inside = functools.partial(function, axis_name="seq", batch_axis="data", head_axis="model", **options)
        got = jax.jit(jax.shard_map(lambda a, f=inside: f(**a), mesh=mesh, in_specs=(spec,), out_specs=spec))(
            arrays
        )
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(
    jax.__version_info__ < (0, 8), reason="jax.checkpoint of such a shard_map fails in JAX itself"
)
def test_remat_keeps_out_and_lse() -> None:
    """A checkpointed ring under a policy that saves by name goes round once forward, once backward."""
    arrays = problem(32)
    policy = jax.checkpoint_policies.save_only_these_names("cuattn_out", "cuattn_lse")
    ring = across(ring_attention, 4)
    counts, grads = [], []
    for wrap in (lambda f: f, functools.partial(jax.checkpoint, policy=policy)):
        run = jax.jit(jax.grad(wrap(lambda a: (ring(**a, causal=True)[0] ** 2).sum())))
        counts.append(run.lower(arrays).as_text().count("collective_permute"))
        grads.append(run(arrays))
    assert counts[0] == counts[1]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), *grads)


def test_lse_alone_and_nothing() -> None:
    arrays = problem(32)
    ring = across(ring_attention, 4, True)
    for pick in (0, 1):
        got = jax.jit(jax.grad(lambda a, f=ring, i=pick: jnp.sin(f(**a, causal=True)[i]).sum()))(arrays)
        one = functools.partial(cuattn.flash_attention, causal=True, return_lse=True)
        want = jax.grad(lambda a, f=one, i=pick: jnp.sin(f(**a)[i]).sum())(arrays)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)


def test_errors_name_the_argument() -> None:
    arrays = problem(32)
    with pytest.raises(ValueError, match=r"axis_name: got 'seq'.*shard_map"):
        ring_attention(**arrays, axis_name="seq")
    for size, extra, words in (
        (4, {"dropout_p": 0.5, "dropout_seed": 1}, r"k: got 8 keys in a part.*multiple of 32"),
        (4, {"window_size": (-3, 0)}, "window_size"),
        (4, {"q_segment_ids": jnp.zeros((2, 32), jnp.int32)}, "kv_segment_ids"),
    ):
        with pytest.raises(ValueError, match=words):
            across(ring_attention, size)(**arrays, **extra)
    with pytest.raises(ValueError, match=r"q: got 4 heads.*8 devices"):
        across(ulysses_attention, 8)(**arrays)
    with pytest.raises(ValueError, match="seqlen"):
        zigzag_order(20, 8)
    with pytest.raises(NotImplementedError, match=r"alibi_slopes.*stop_gradient"):
        jax.jit(jax.grad(lambda s: across(ring_attention, 4)(**arrays, alibi_slopes=s)[0].sum()))(jnp.ones(4))


PROCESS = """
import sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
import jax.numpy as jnp
import numpy as np
import cuattn
from cuattn.interop.jax import ring_attention, ulysses_attention, zigzag_order
from jax.sharding import NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((4,), ("seq",), **{WHOLE})
assert len(mesh.local_devices) == 2
whole = [np.random.default_rng(i).standard_normal((1, 64, 4, 8)).astype(np.float32) for i in range(3)]
def total(function):
    return jax.jit(jax.value_and_grad(lambda *a: (function(*a) ** 2).sum(), argnums=(0, 1, 2)))

want = total(lambda *a: cuattn.flash_attention(*a, causal=True))(*whole)
for function, order in ((ring_attention, zigzag_order(64, 4)), (ulysses_attention, np.arange(64))):
    spec = NamedSharding(mesh, P(None, "seq"))
    split = [jax.make_array_from_callback(x.shape, spec, lambda at, x=x[:, order]: x[at]) for x in whole]
    extra = {"zigzag": True} if function is ring_attention else {}
    inside = jax.shard_map(
        lambda *a: function(*a, axis_name="seq", causal=True, **extra), mesh=mesh, in_specs=P(None, "seq"),
        out_specs=P(None, "seq"),
    )
    value, grads = total(inside)(*split)
    np.testing.assert_allclose(float(value), float(want[0]), rtol=1e-5)
    for got, x in zip(grads, want[1]):
        for part in got.addressable_shards:
            np.testing.assert_allclose(part.data, np.asarray(x)[:, order][part.index], rtol=1e-4, atol=1e-5)
print("equal")
"""


def test_two_processes() -> None:
    """The same on two processes of two devices each, over gloo."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    whole = '{"axis_types": (jax.sharding.AxisType.Auto,)} if hasattr(jax.sharding, "AxisType") else {}'
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    code = PROCESS.replace("{WHOLE}", f"({whole})")
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, port, str(i)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, env=env,
        )
        for i in range(2)
    ]  # fmt: skip
    outputs = [p.communicate(timeout=300)[0] for p in running]
    for p, output in zip(running, outputs, strict=True):
        assert p.returncode == 0 and "equal" in output, output
