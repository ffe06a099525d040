"""Hopper's forward kernel on a GPU: lengths around its tile edges, bytes around outputs, repeats, NaN."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cases
import numpy as np
import pytest

from cuattn import device
from cuattn.backends import cuda, reference
from cuattn.families import sm90
from cuattn.interop import adapters
from cuattn.spec import AttentionSpec, bind

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
cupy = pytest.importorskip("cupy")

GUARD = 4096  # bytes before and after an output that must stay as they are
PATTERN = 0x5A
BATCHES = (1, 1000)  # choose tiles of 64 rows, and those for a GPU that is full
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (40, 7)},
}


def draw(*shape: int, dtype: str = "bfloat16", seed: int = 0) -> Any:
    numbers = cupy.random.RandomState(seed).standard_normal(shape, dtype=cupy.float32)
    return numbers.astype(cases.NUMPY_DTYPES[dtype])


def spec_of(arrays: dict[str, Any], options: dict[str, Any], layout: str) -> AttentionSpec:
    adapter = adapters.load("cupy")
    return bind({name: adapter.signature(x) for name, x in arrays.items()}, layout=layout, **options)


def prepare(spec: AttentionSpec, batch: int = 0) -> cuda.Prepared:
    """The program of a spec; ``batch`` chooses the tile as if the batch were of that size."""
    found = device.query(0)
    assert sm90.refuses(spec, found) is None
    tile = sm90.tile(replace(spec, batch=batch or spec.batch), found)
    return cuda.prepare_program(sm90.forward(spec, found, tile), 0)


def run(prepared: cuda.Prepared, arrays: dict[str, Any]) -> dict[str, Any]:
    """The program's outputs; they lie between guard bands and start as NaN."""
    program = prepared.program
    found, bands = {}, []
    for buffer in program.outputs:
        dtype = np.dtype(cases.NUMPY_DTYPES.get(buffer.dtype, buffer.dtype))
        size = int(np.prod(buffer.shape)) * dtype.itemsize
        memory = cupy.full(size + 2 * GUARD, PATTERN, cupy.uint8)
        memory[GUARD : GUARD + size] = 0xFF  # NaN in every floating-point format
        found[buffer.name] = memory[GUARD : GUARD + size].view(dtype).reshape(buffer.shape)
        bands += [memory[:GUARD], memory[GUARD + size :]]
    scratch = {b.name: cupy.full(b.shape, -1, b.dtype) for b in program.workspace}
    addresses = [x.data.ptr for x in ({**arrays, **found, **scratch}[n] for n in names(prepared))]
    seed = arrays.get("dropout_seed")
    stream = cupy.cuda.get_current_stream().ptr
    prepared._launch(addresses, 0 if seed is None else int(seed[0]), stream)
    for band in bands:
        assert bool((band == PATTERN).all()), "written outside of an output"
    return found


def names(prepared: cuda.Prepared) -> list[str]:
    program = prepared.program
    inputs = (name for name in program.inputs if name != "dropout_seed")
    return [*inputs, *(b.name for b in program.outputs), *(b.name for b in program.workspace)]


def plain(spec: AttentionSpec, arrays: dict[str, Any], low: bool = False) -> tuple[Any, Any]:
    """(out, lse) of plain attention in float64, or with q's dtype wherever an array is kept (``low``)."""
    wide = cupy.float32 if low else cupy.float64

    def kept(x: Any) -> Any:
        return x.astype(arrays["q"].dtype).astype(wide) if low else x

    q, k, v = (arrays[n].astype(wide).transpose(0, 2, 1, 3) for n in "qkv")
    k, v = (cupy.repeat(x, spec.group, axis=1) for x in (k, v))
    scores = kept((q @ k.swapaxes(-1, -2)) * spec.softmax_scale)
    assert isinstance(spec.q_offset, int)
    distance = cupy.arange(spec.seqlen_kv)[None] - cupy.arange(spec.seqlen_q)[:, None] - spec.q_offset
    seen = cupy.ones(distance.shape, bool)
    if spec.window_right >= 0:
        seen &= distance <= spec.window_right
    if spec.window_left >= 0:
        seen &= -distance <= spec.window_left
    scores = cupy.where(seen, scores, -cupy.inf)
    top = cupy.maximum(scores.max(axis=-1, keepdims=True), -1e30)
    weights = cupy.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    out = kept(weights / cupy.maximum(total, 1e-300 if not low else 1e-30)) @ v
    with np.errstate(divide="ignore"):
        lse = (top + cupy.log(total))[..., 0]
    return kept(out).transpose(0, 2, 1, 3), lse


def check(spec: AttentionSpec, arrays: dict[str, Any], *results: dict[str, Any]) -> None:
    """Every element written, out as good as plain attention in the same dtype, LSE to float32."""
    out, lse = plain(spec, arrays)
    bar = 2 * float(cupy.abs(plain(spec, arrays, low=True)[0] - out).max()) + 1e-5
    for found in results:
        error = cupy.abs(found["out"].astype(cupy.float64) - out)
        assert float(error.max()) <= bar  # false for NaN too
        same = (found["lse"] == lse) | (cupy.abs(found["lse"] - lse) <= 1e-4 + 4e-6 * cupy.abs(lse))
        assert bool(same.all())


def make(
    sq: int, sk: int, head_dim: int, head_dim_v: int | None = None, dtype: str = "bfloat16", **options: Any
) -> tuple[AttentionSpec, dict[str, Any]]:
    arrays = {
        "q": draw(2, sq, 4, head_dim, dtype=dtype, seed=sq),
        "k": draw(2, sk, 2, head_dim, dtype=dtype, seed=sk + 1),
        "v": draw(2, sk, 2, head_dim_v or head_dim, dtype=dtype, seed=sk + 2),
    }
    return spec_of(arrays, options, "bshd"), arrays


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_length_to_300(head_dim: int, mask: str) -> None:
    for n in range(1, 301):
        spec, arrays = make(n, n if n % 2 else 301 - n, head_dim, **MASKS[mask])
        check(spec, arrays, *(run(prepare(spec, batch), arrays) for batch in BATCHES))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_lengths_at_tile_edges(head_dim: int, mask: str) -> None:
    t = sm90.tile(replace(make(2000, 2000, head_dim)[0], batch=1000), device.query(0))
    rows = [n * t.block_m + d for n in (1, 2) for d in (-1, 0, 1)]
    keys = [n * t.block_n + d for n in (1, 2, 5) for d in (-1, 0, 1)]
    for sq, sk in itertools.product(rows, keys):
        spec, arrays = make(sq, sk, head_dim, **MASKS[mask])
        check(spec, arrays, *(run(prepare(spec, batch), arrays) for batch in BATCHES))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [(8, 8), (40, 72), (80, 80), (96, 96), (64, 128), (128, 64), (192, 128), (64, 256), (256, 64)],
)
def test_head_dims(head_dim: int, head_dim_v: int, dtype: str) -> None:
    for options in MASKS.values():
        spec, arrays = make(333, 257, head_dim, head_dim_v, dtype, **options)
        check(spec, arrays, *(run(prepare(spec, batch), arrays) for batch in BATCHES))


GROWTH: dict[str, Callable[[Any], Any]] = {  # of scores along keys: natural units by (key, keys)
    "steadily": lambda j: 80 * j,
    "towards the first key": lambda j: 80 * (1 - j),
    "in jumps": lambda j: 90.0 * (cupy.floor(1000 * j) % 97 == 5),
    "up and down": lambda j: 300 * cupy.sin(40 * j) - 200,
    "little": lambda j: 15 * (1 - j),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("growth", GROWTH)
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "dtype"),
    [
        *itertools.chain(*(((d, d, "bfloat16"), (d, d, "float16")) for d in (64, 128, 256))),
        (192, 128, "bfloat16"),
        (192, 192, "bfloat16"),
    ],
)
def test_scores_that_grow(head_dim: int, head_dim_v: int, dtype: str, growth: str, mask: str) -> None:
    """Rows whose weights outgrow their reference: all of them, every other one, in any key block."""
    for sq, sk in ((300, 300), (129, 700), (1000, 1100)):
        spec, arrays = make(sq, sk, head_dim, head_dim_v, dtype, **MASKS[mask])
        ramp = GROWTH[growth](cupy.arange(sk, dtype=cupy.float32) / sk) / spec.softmax_scale
        for sign in (4.0, -4.0):
            arrays["q"][..., 0] = 4.0
            arrays["q"][:, ::2, :, 0] = sign
            arrays["k"][..., 0] = (ramp / 4).astype(arrays["k"].dtype)[None, :, None]
            check(spec, arrays, *(run(prepare(spec, batch), arrays) for batch in BATCHES))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rows_do_not_change_each_other(head_dim: int) -> None:
    """A row that needs a new reference, or is NaN, shares a warp with others: their bits stay."""
    spec, arrays = make(256, 1000, head_dim)
    prepared = prepare(spec, 1000)
    calm = run(prepared, arrays)
    arrays["q"][:, 5::16] *= 200
    arrays["q"][:, 12] = np.nan
    found = run(prepared, arrays)
    kept = np.ones(256, bool)
    kept[5::16] = kept[12] = False
    for name, axis, bits in (("out", 1, cupy.uint16), ("lse", 2, cupy.uint32)):
        x, y = (cupy.compress(kept, r[name].view(bits), axis=axis) for r in (calm, found))
        assert bool((x == y).all()), name
    assert bool(cupy.isnan(found["out"][:, 12].astype(cupy.float32)).all())


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_hundred_runs_are_the_same(head_dim: int, mask: str) -> None:
    arrays = {name: draw(2, 2500, 12, head_dim, seed=ord(name)) for name in "qkv"}
    prepared = prepare(spec_of(arrays, MASKS[mask], "bshd"))
    first = run(prepared, arrays)
    for _ in range(100):
        again = run(prepared, arrays)
        for name, x in first.items():
            assert bool((x.view(cupy.uint8) == again[name].view(cupy.uint8)).all()), name


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (50, 20)}])
def test_what_lies_beyond_the_lengths_is_not_seen(head_dim: int, options: dict[str, Any], batch: int) -> None:
    lengths = {"q_seqlens": [0, 1, 257, 300, 63], "kv_seqlens": [5, 300, 0, 129, 257]}
    arrays: dict[str, Any] = {n: draw(5, 300, 4 if n == "q" else 2, head_dim, seed=ord(n)) for n in "qkv"}
    arrays |= {name: cupy.asarray(x, cupy.int32) for name, x in lengths.items()}
    prepared = prepare(spec_of(arrays, options, "bshd"), batch)
    clean = run(prepared, arrays)
    for name in "qkv":
        for b, n in enumerate(lengths["q_seqlens" if name == "q" else "kv_seqlens"]):
            arrays[name][b, n:] = np.nan
    found = run(prepared, arrays)
    for name, x in clean.items():
        assert bool((x.view(cupy.uint8) == found[name].view(cupy.uint8)).all()), name
    for b, n in enumerate(lengths["q_seqlens"]):
        assert bool((found["out"][b, n:].astype(cupy.float32) == 0).all())
        assert bool((found["lse"][b, :, n:] == -cupy.inf).all())


@pytest.mark.parametrize(
    "options", [{"causal": True, "q_offset": -70}, {"window_size": (10, -1), "q_offset": 90}]
)
def test_keys_that_no_query_sees_may_be_nan(options: dict[str, Any]) -> None:
    spec, arrays = make(200, 200, 128, **options)
    prepared = prepare(spec)
    clean = run(prepared, arrays)
    hidden = slice(130, None) if "causal" in options else slice(0, 80)
    arrays["k"][:, hidden] = np.nan
    arrays["v"][:, hidden] = np.inf
    found = run(prepared, arrays)
    for name, x in clean.items():
        assert bool((x.view(cupy.uint8) == found[name].view(cupy.uint8)).all()), name


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("sequences", "batch"), [(1, 1), (7, 1), (7, 1000), (40, 1000), (3000, 1000)])
def test_packed_sequences(sequences: int, batch: int, head_dim: int, causal: bool) -> None:
    """Each as if it were alone; lengths 0 among them, and NaN in the others."""
    rng = np.random.default_rng(sequences)
    longest = 400 if sequences < 100 else 12
    lengths = {n: rng.integers(0, longest, sequences) for n in "qk"}
    starts = {n: np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for n, x in lengths.items()}
    arrays: dict[str, Any] = {
        "q": draw(int(starts["q"][-1]), 4, head_dim),
        "k": draw(int(starts["k"][-1]), 2, head_dim, seed=1),
        "v": draw(int(starts["k"][-1]), 2, head_dim, seed=2),
    }
    arrays |= {f"cu_seqlens_{n}": cupy.asarray(x) for n, x in starts.items()}
    options = {"causal": causal, "max_seqlen_q": longest, "max_seqlen_k": longest}
    prepared = prepare(spec_of(arrays, options, "thd"), batch)
    found = run(prepared, arrays)
    for b in rng.permutation(sequences)[:12]:
        q, k = (slice(int(starts[n][b]), int(starts[n][b + 1])) for n in "qk")
        out, lse = found["out"][None, q], found["lse"][None, :, q]
        if q.stop == q.start:
            continue
        if k.stop == k.start:
            assert bool((out.astype(cupy.float32) == 0).all()) and bool((lse == -cupy.inf).all())
            continue
        alone = {"q": arrays["q"][None, q], "k": arrays["k"][None, k], "v": arrays["v"][None, k]}
        check(spec_of(alone, {"causal": causal}, "bshd"), alone, {"out": out, "lse": lse})
    largest = int(np.argmax(lengths["k"]))
    arrays["k"][starts["k"][largest] : starts["k"][largest + 1]] = np.nan
    arrays["v"][starts["k"][largest] : starts["k"][largest + 1]] = np.nan
    poisoned = run(prepared, arrays)["out"]
    rest = np.ones(int(starts["q"][-1]), bool)
    rest[starts["q"][largest] : starts["q"][largest + 1]] = False
    rest = cupy.asarray(rest)
    assert bool((poisoned.view(cupy.uint16)[rest] == found["out"].view(cupy.uint16)[rest]).all())


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_packed_sequences_drop_the_reference_s_weights(head_dim: int, batch: int) -> None:
    starts = np.cumsum([0, 130, 0, 1, 257, 64]).astype(np.int32)
    arrays: dict[str, Any] = {n: draw(int(starts[-1]), 4 if n == "q" else 2, head_dim) for n in "qkv"}
    arrays |= {f"cu_seqlens_{n}": cupy.asarray(starts) for n in "qk"}
    arrays["dropout_seed"] = cupy.asarray([12345, 0, 0, 0, 0])
    options = {"causal": True, "max_seqlen_q": 257, "max_seqlen_k": 257, "dropout_p": 0.2}
    spec = spec_of(arrays, options, "thd")
    host = {n: x.get() for n, x in arrays.items()}
    out, lse = reference.attention(spec, host)
    own = reference.own_arithmetic(cases.NUMPY_DTYPES[spec.dtype])
    bar = 2 * float(np.abs(reference.attention(spec, host, own)[0] - out).max()) + 1e-3
    found = run(prepare(spec, batch), arrays)
    assert float(np.abs(found["out"].get().astype(np.float64) - out).max()) <= bar
    assert float(np.abs(found["lse"].get() - lse).max()) <= 2e-3


FEATURES: dict[str, dict[str, Any]] = {
    "bias": {"bias": ("dtype", (2, 4, "sq", "sk"))},
    "float32 bias over batch": {"bias": ("float32", (1, 4, "sq", "sk"))},
    "bias of keys": {"bias": ("dtype", (2, 1, 1, "sk"))},
    "float32 bias, mask and segments": {
        "bias": ("float32", (2, 1, "sq", "sk")),
        "mask": (2, 4, "sq", "sk"),
        "segments": 2,
    },
    "mask": {"mask": (2, 4, "sq", "sk")},
    "mask of keys": {"mask": (2, 1, 1, "sk")},
    "padding": {"mask": (2, 1, 1, "sk"), "padding": True},
    "softcap": {"softcap": 30.0},
    "softcap that scores outgrow": {"softcap": 30.0, "ramp": 80.0},
    "segments": {"segments": 3},
    "documents": {"documents": 4},
    "alibi": {"alibi": True},
    "dropout": {"dropout_p": 0.2},
    "bias and mask within lengths": {
        "bias": ("dtype", (2, 4, "sq", "sk")),
        "mask": (2, 1, "sq", "sk"),
        "lengths": True,
    },
    "everything": {
        "bias": ("dtype", (2, 4, "sq", "sk")),
        "mask": (1, 1, "sq", "sk"),
        "segments": 2,
        "dropout_p": 0.1,
    },
}


def feature_arrays(
    feature: str, sq: int, sk: int, head_dim: int, head_dim_v: int, mask: str
) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """NumPy operands of a feature, options, and which scores (batch, heads, sq, sk) it leaves."""
    rng = np.random.default_rng(sq)
    arrays = {n: x.get() for n, x in make(sq, sk, head_dim, head_dim_v)[1].items()}
    what, size, options = FEATURES[feature], {"sq": sq, "sk": sk}, dict(MASKS[mask])
    seen = np.ones((2, 4, sq, sk), bool)
    if "bias" in what:
        dtype, shape = what["bias"]
        bias = rng.standard_normal([size.get(n, n) for n in shape])
        bias[rng.random(bias.shape) < 0.2] = -np.inf
        arrays["bias"] = bias.astype(cases.NUMPY_DTYPES["bfloat16" if dtype == "dtype" else dtype])
        seen &= bias != -np.inf
    if "mask" in what:
        shown = rng.random([size.get(n, n) for n in what["mask"]]) < 0.6
        shown[..., sk // 2 : sk // 2 + 80] = False
        if "padding" in what:
            shown[:] = np.arange(sk) < sk * 3 // 4
        arrays["mask"] = shown
        seen &= shown
    if "segments" in what:
        ids = {n: rng.integers(0, what["segments"], (2, size[f"s{n}"])).astype(np.int32) for n in "qk"}
        ids["k"][:, sk // 3 : sk // 2] = 99
        arrays |= {"q_segment_ids": ids["q"], "kv_segment_ids": ids["k"]}
        seen &= (ids["q"][:, :, None] == ids["k"][:, None, :])[:, None]
    if "documents" in what:
        ids = {
            n: np.sort(rng.integers(0, what["documents"], (2, size[f"s{n}"])).astype(np.int32)) for n in "qk"
        }
        arrays |= {"q_segment_ids": ids["q"], "kv_segment_ids": ids["k"]}
        seen &= (ids["q"][:, :, None] == ids["k"][:, None, :])[:, None]
    if "softcap" in what:
        options["softcap"] = what["softcap"]
    if "ramp" in what:  # scores that rise along keys, or fall
        arrays["q"][..., 0] = 4
        arrays["q"][:, 3::5, :, 0] = -4
        ramp = np.linspace(0, what["ramp"] * head_dim**0.5 / 4, sk)
        arrays["k"][..., 0] = ramp[None, :, None].astype(arrays["k"].dtype)
    if "alibi" in what:
        arrays["alibi_slopes"] = np.linspace(0.02, 0.5, 4, dtype=np.float32)
    ends = np.array([[sq, sk], [sq, sk]])
    if "lengths" in what:
        ends = np.array([[sq - sq // 3, sk], [sq, sk - sk // 4]])
        arrays |= {f"{side}_seqlens": ends[:, i].astype(np.int32) for i, side in enumerate(("q", "kv"))}
    left, right = options.get("window_size", (sq + sk, 0 if mask == "causal" else sq + sk))
    rows, keys = np.arange(sq)[:, None], np.arange(sk)[None]
    for i, (rows_end, keys_end) in enumerate(ends):
        distance = keys - rows - (keys_end - rows_end)
        seen[i] &= (distance <= right) & (-distance <= left) & (rows < rows_end) & (keys < keys_end)
    if "dropout_p" in what:
        options["dropout_p"] = what["dropout_p"]
        arrays["dropout_seed"] = np.array([12345, 0, 0, 0, 0])
    return arrays, options, seen


FEATURE_DIMS = [(40, 40), (64, 64), (128, 128), (192, 128), (256, 256)]


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), FEATURE_DIMS)
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature: str, head_dim: int, head_dim_v: int, mask: str) -> None:
    """As good as plain attention; then NaN goes wherever nothing looks, and no bit may change."""
    for (sq, sk), batches in (((64, 64), (1,)), ((257, 300), BATCHES), ((130, 259), (1000,))):
        check_feature(feature, sq, sk, head_dim, head_dim_v, mask, batches)


@pytest.mark.parametrize("mask", ["causal", "window"])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 192), (136, 200), (64, 256), (256, 64)])
@pytest.mark.parametrize("feature", ["bias", "mask of keys", "documents", "dropout", "everything"])
def test_features_at_other_wide_head_dims(feature: str, head_dim: int, head_dim_v: int, mask: str) -> None:
    check_feature(feature, 257, 320, head_dim, head_dim_v, mask, (1000,))


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize(
    "feature",
    [
        *("bias", "float32 bias over batch", "bias of keys", "mask", "mask of keys", "padding", "documents"),
        *("alibi", "dropout", "softcap", "softcap that scores outgrow"),
    ],
)
def test_features_over_many_blocks(feature: str, head_dim: int, head_dim_v: int, mask: str) -> None:
    check_feature(feature, 300, 4360, head_dim, head_dim_v, mask, BATCHES)


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("head_dim", [40, 96, 128])
@pytest.mark.parametrize("offset", [0, 4096, 4160, -128])
def test_alibi_of_aligned_diagonals(offset: int, head_dim: int, mask: str) -> None:
    """Where only a tile's first block has keys on both sides of a row, the others are not asked."""
    check_feature("alibi", 500, 500 + offset, head_dim, head_dim, mask, BATCHES)


def check_feature(
    feature: str, sq: int, sk: int, head_dim: int, head_dim_v: int, mask: str, batches: tuple[int, ...]
) -> None:
    arrays, options, seen = feature_arrays(feature, sq, sk, head_dim, head_dim_v, mask)
    gpu = {n: cupy.asarray(x) for n, x in arrays.items()}
    spec = spec_of(gpu, options, "bshd")
    out, lse = reference.attention(spec, arrays)
    own = reference.own_arithmetic(cases.NUMPY_DTYPES[spec.dtype])
    plain_out, plain_lse = reference.attention(spec, arrays, own)
    bar = 2 * float(np.abs(plain_out - out).max()) + 1e-3
    coarse = 2e-3  # of LSE
    if spec.softcap:  # times tanh's error
        coarse += 2 * float(np.abs(plain_lse - lse)[np.isfinite(lse)].max())
    hidden_q = ~seen.any(3).transpose(0, 2, 1)
    hidden_k = ~seen.reshape(2, 2, 2, sq, sk).any((2, 3)).transpose(0, 2, 1)
    poisoned = {n: x.copy() for n, x in gpu.items()}
    for name in "qkv":
        poisoned[name][cupy.asarray(hidden_q if name == "q" else hidden_k)] = np.nan
    for batch in batches:
        prepared = prepare(spec, batch)
        found = run(prepared, gpu)
        assert float(np.abs(found["out"].get().astype(np.float64) - out).max()) <= bar
        got = found["lse"].get()
        with np.errstate(invalid="ignore"):  # of two -infinities
            assert ((got == lse) | (np.abs(got - lse) <= coarse)).all()
        again = run(prepared, poisoned)
        for name, x in found.items():
            assert bool((x.view(cupy.uint8) == again[name].view(cupy.uint8)).all()), name
