"""What callers give and get: kinds of arrays, and errors that name the argument before anything runs."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuattn

Normal = Callable[..., Any]
REFERENCE = {"backend": "reference"}


def qkv(normal: Normal, dtype: Any = np.float32) -> dict[str, Any]:
    return {n: normal(2, s, h, 8).astype(dtype) for n, s, h in (("q", 6, 4), ("k", 7, 2), ("v", 7, 2))}


BAD: list[tuple[str, dict[str, Any], type[Exception]]] = [
    ("q", {"q": [[1.0]]}, TypeError),
    ("q", {"q": np.zeros((2, 6, 4, 8), np.int32)}, TypeError),
    ("q", {"q": np.zeros((6, 4, 8), np.float32)}, ValueError),
    ("q", {"q": np.zeros((2, 6, 4, 257), np.float32), "k": np.zeros((2, 7, 2, 257), np.float32)}, ValueError),
    ("q", {"q": np.zeros((2, 6, 4, 0), np.float32), "k": np.zeros((2, 7, 2, 0), np.float32)}, ValueError),
    ("k", {"k": np.zeros((2, 7, 2, 8), np.float16)}, TypeError),
    ("k", {"k": np.zeros((3, 7, 2, 8), np.float32)}, ValueError),
    ("k", {"k": np.zeros((2, 7, 3, 8), np.float32), "v": np.zeros((2, 7, 3, 8), np.float32)}, ValueError),
    ("k", {"k": np.zeros((2, 7, 0, 8), np.float32), "v": np.zeros((2, 7, 0, 8), np.float32)}, ValueError),
    ("k", {"k": np.zeros((2, 7, 2, 9), np.float32)}, ValueError),
    ("v", {"v": np.zeros((2, 8, 2, 8), np.float32)}, ValueError),
    ("v", {"v": np.zeros((2, 7, 1, 8), np.float32)}, ValueError),
    ("v", {"v": np.zeros((2, 7, 2, 300), np.float32)}, ValueError),
    ("window_size", {"window_size": (-2, 3)}, ValueError),
    ("window_size", {"window_size": 5}, ValueError),
    ("window_size", {"window_size": (1, 2, 3)}, ValueError),
    ("window_size", {"window_size": (1.5, 2)}, ValueError),
    ("softmax_scale", {"softmax_scale": "x"}, TypeError),
    ("softmax_scale", {"softmax_scale": float("nan")}, ValueError),
    ("softcap", {"softcap": -1.0}, ValueError),
    ("dropout_p", {"dropout_p": 1.0, "dropout_seed": 1}, ValueError),
    ("dropout_p", {"dropout_p": -0.1, "dropout_seed": 1}, ValueError),
    ("dropout_seed", {"dropout_p": 0.5}, ValueError),
    ("dropout_seed", {"dropout_p": 0.5, "dropout_seed": 1.5}, TypeError),
    ("dropout_seed", {"dropout_p": 0.5, "dropout_seed": 1 << 64}, ValueError),
    ("layout", {"layout": "sbhd"}, ValueError),
    ("layout", {"layout": "thd"}, ValueError),
    ("precision", {"precision": "tf16"}, ValueError),
    ("backend", {"backend": "torch"}, ValueError),
    ("q_offset", {"q_offset": 1.5}, TypeError),
    ("q_offset", {"q_offset": np.zeros(3, np.int32)}, ValueError),
    ("q_seqlens", {"q_seqlens": np.zeros(3, np.int32)}, ValueError),
    ("q_seqlens", {"q_seqlens": np.array([7, 1], np.int32)}, ValueError),
    ("kv_seqlens", {"kv_seqlens": np.zeros(2, np.float32)}, TypeError),
    ("kv_seqlens", {"kv_seqlens": [-1, 2]}, ValueError),
    ("kv_segment_ids", {"q_segment_ids": np.zeros((2, 6), np.int32)}, ValueError),
    ("q_segment_ids", {"kv_segment_ids": np.zeros((2, 7), np.int32)}, ValueError),
    (
        "q_segment_ids",
        {"q_segment_ids": np.zeros((2, 7), int), "kv_segment_ids": np.zeros((2, 7), int)},
        ValueError,
    ),
    ("bias", {"bias": np.zeros((5, 7), np.float32)}, ValueError),
    ("bias", {"bias": np.zeros((1, 2, 4, 6, 7), np.float32)}, ValueError),
    ("bias", {"bias": np.zeros((6, 7), np.int32)}, TypeError),
    ("bias", {"bias": np.zeros((6, 7), np.float16)}, TypeError),
    ("mask", {"mask": np.zeros((6, 7), np.float32)}, TypeError),
    ("mask", {"mask": np.zeros((3, 1, 6, 7), bool)}, ValueError),
    ("alibi_slopes", {"alibi_slopes": np.zeros(3, np.float32)}, ValueError),
    ("alibi_slopes", {"alibi_slopes": np.zeros(4, np.float64)}, TypeError),
    ("sinks", {"sinks": np.zeros((2, 4), np.float32)}, ValueError),
    ("sinks", {"sinks": np.zeros(4, np.float16)}, TypeError),
]


@pytest.mark.parametrize(
    ("argument", "changes", "kind"), BAD, ids=[f"{a}-{i}" for i, (a, _, _) in enumerate(BAD)]
)
@pytest.mark.parametrize("backend", ["reference", "numba"])
def test_wrong_input_names_the_argument(
    normal: Normal, argument: str, changes: dict[str, Any], kind: type[Exception], backend: str
) -> None:
    arguments = {**qkv(normal), "backend": backend, **changes}
    with pytest.raises(kind, match=rf"^{argument}: .*takes "):
        cuattn.flash_attention(**arguments)


PACKED_BAD: list[tuple[str, dict[str, Any], type[Exception]]] = [
    ("cu_seqlens_q", {"cu_seqlens_q": None}, TypeError),
    ("cu_seqlens_q", {"cu_seqlens_q": np.array([0, 7], np.float32)}, TypeError),
    ("cu_seqlens_q", {"cu_seqlens_q": np.array([0, 4, 3, 6])}, ValueError),
    ("cu_seqlens_q", {"cu_seqlens_q": np.array([0, 3, 5, 9])}, ValueError),
    ("cu_seqlens_q", {"cu_seqlens_q": np.array([1, 3, 5, 6])}, ValueError),
    ("cu_seqlens_k", {"cu_seqlens_k": np.array([0, 7])}, ValueError),
    ("max_seqlen_q", {"max_seqlen_q": -1}, TypeError),
    ("max_seqlen_q", {"max_seqlen_q": 1}, ValueError),
    ("q", {"q": np.zeros((1, 6, 4, 8), np.float32)}, ValueError),
]


@pytest.mark.parametrize(
    ("argument", "changes", "kind"), PACKED_BAD, ids=[f"{a}-{i}" for i, (a, _, _) in enumerate(PACKED_BAD)]
)
def test_wrong_packed_input(
    normal: Normal, argument: str, changes: dict[str, Any], kind: type[Exception]
) -> None:
    arguments = {
        "q": normal(6, 4, 8), "k": normal(7, 2, 8), "v": normal(7, 2, 8),
        "cu_seqlens_q": np.array([0, 2, 5, 6]), "cu_seqlens_k": np.array([0, 3, 3, 7]), **changes,
    }  # fmt: skip
    with pytest.raises(kind, match=rf"^{argument}: .*takes "):
        cuattn.flash_attention_varlen(**arguments, **REFERENCE)


def test_unknown_keywords_of_the_pullback_forms(normal: Normal) -> None:
    with pytest.raises(TypeError, match="windowsize"):
        cuattn.flash_attention_vjp(**qkv(normal), windowsize=(1, 1))
    with pytest.raises(TypeError, match="cu_seqlens_q"):
        cuattn.flash_attention_varlen_vjp(normal(6, 4, 8), normal(7, 2, 8), normal(7, 2, 8))


def test_wrong_incoming_gradients(normal: Normal) -> None:
    (_, _), pullback = cuattn.flash_attention_vjp(**qkv(normal), return_lse=True, **REFERENCE)
    for name, dout, dlse, kind in (
        ("dout", normal(2, 6, 4, 9), None, ValueError),
        ("dout", normal(2, 6, 4, 8).astype(np.float16), None, TypeError),
        ("dout", "x", None, TypeError),
        ("dlse", None, normal(2, 4, 7), ValueError),
    ):
        with pytest.raises(kind, match=rf"^{name}: "):
            pullback(dout, dlse)
    with pytest.raises(ValueError, match=r"^wants: "):
        pullback(normal(2, 6, 4, 8), wants=("bias",))


def test_results_are_of_the_callers_kind(normal: Normal) -> None:
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
        given = qkv(normal, dtype)
        (out, lse), pullback = cuattn.flash_attention_vjp(**given, return_lse=True, **REFERENCE)
        assert isinstance(out, np.ndarray) and out.dtype == dtype and out.shape == (2, 6, 4, 8)
        assert lse.shape == (2, 4, 6) and lse.dtype == (np.float64 if dtype is np.float64 else np.float32)
        found = pullback(out)
        assert isinstance(found, cuattn.Gradients)
        assert found.dbias is None and found.dsinks is None
        for name in "qkv":
            gradient = getattr(found, f"d{name}")
            assert gradient.shape == given[name].shape and gradient.dtype == dtype
        zero = pullback(None)
        assert all((x == 0).all() for x in zero[:3])


def test_layouts_and_subclasses_agree(normal: Normal) -> None:
    given = qkv(normal)
    out = cuattn.flash_attention(**given, causal=True, **REFERENCE)
    swapped = {n: x.transpose(0, 2, 1, 3) for n, x in given.items()}
    again = cuattn.flash_attention(**swapped, causal=True, layout="bhsd", **REFERENCE)
    np.testing.assert_array_equal(out, again.transpose(0, 2, 1, 3))

    class Mine(np.ndarray):
        pass

    again = cuattn.flash_attention(**{n: x.view(Mine) for n, x in given.items()}, causal=True, **REFERENCE)
    np.testing.assert_array_equal(out, again)


def test_small_operands_of_any_integer_dtype(normal: Normal) -> None:
    given = qkv(normal)
    wanted = cuattn.flash_attention(**given, kv_seqlens=np.array([3, 7], np.int32), **REFERENCE)
    for lengths in ([3, 7], (3, 7), np.array([3, 7], np.uint8), np.array([3, 0, 7])[::2]):
        np.testing.assert_array_equal(
            cuattn.flash_attention(**given, kv_seqlens=lengths, **REFERENCE), wanted
        )
    np.testing.assert_array_equal(
        cuattn.flash_attention(**given, causal=True, q_offset=np.int64(1), **REFERENCE),
        cuattn.flash_attention(**given, causal=True, q_offset=[1, 1], **REFERENCE),
    )


class Foreign:
    """An array of a library that offers DLPack alone."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()


def test_dlpack_arrays_come_back_in_kind(normal: Normal, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    library = types.ModuleType("somelib")
    library.from_dlpack = lambda x: Foreign(np.from_dlpack(x))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "somelib", library)
    monkeypatch.setattr(Foreign, "__module__", "somelib")
    given = qkv(normal)
    out, pullback = cuattn.flash_attention_vjp(**{n: Foreign(x) for n, x in given.items()}, **REFERENCE)
    assert isinstance(out, Foreign)
    np.testing.assert_array_equal(out.x, cuattn.flash_attention(**given, **REFERENCE))
    assert isinstance(pullback(Foreign(out.x)).dk, Foreign)


@pytest.mark.filterwarnings("default")
def test_torch_tensors(normal: Normal) -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        given = {n: torch.from_numpy(x).to(dtype) for n, x in qkv(normal).items()}
        (out, lse), pullback = cuattn.flash_attention_vjp(**given, return_lse=True, **REFERENCE)
        assert isinstance(out, torch.Tensor) and out.dtype == dtype and isinstance(lse, torch.Tensor)
        wanted = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2).double().repeat_interleave(4 // x.shape[2], 1) for x in given.values())
        ).transpose(1, 2)
        assert (out.double() - wanted).abs().max() < 2e-2
        assert pullback(out).dq.dtype == dtype


def test_mixed_libraries_are_refused(normal: Normal) -> None:
    jnp = pytest.importorskip("jax.numpy")
    given = qkv(normal)

    class Closed(Foreign):
        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("not exportable")

    with pytest.raises(TypeError, match=r"^k: .*not exportable"):
        cuattn.flash_attention(given["q"], Closed(given["k"]), given["v"])
    out = cuattn.flash_attention(jnp.asarray(given["q"]), given["k"], given["v"])
    assert isinstance(out, type(jnp.zeros(())))


@pytest.mark.parametrize("causal", [False, True])
def test_a_second_call_with_other_values_and_the_same_shapes(normal: Normal, causal: bool) -> None:
    for seed in range(3):
        given = {n: x + seed for n, x in qkv(normal).items()}
        for backend in ("reference", "numba"):
            out = cuattn.flash_attention(
                **given, causal=causal, dropout_p=0.5, dropout_seed=seed, backend=backend
            )
            again = cuattn.flash_attention(
                **given, causal=causal, dropout_p=0.5, dropout_seed=seed, **REFERENCE
            )
            np.testing.assert_allclose(out, again, rtol=1e-5, atol=1e-5)


def test_flash_attn_names(normal: Normal) -> None:
    from cuattn.interop import flash_attn as fa

    q, kv = normal(2, 6, 4, 8), normal(2, 6, 2, 4, 8)
    k, v = kv[:, :, 0], kv[:, :, 1]
    wanted = cuattn.flash_attention(q, k, v, causal=True, return_lse=True)
    out, lse, none = fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    np.testing.assert_array_equal(out, wanted[0])
    np.testing.assert_array_equal(lse, wanted[1])
    assert none is None
    np.testing.assert_array_equal(fa.flash_attn_kvpacked_func(q, kv, 0.0, None, True), wanted[0])
    qkv_packed = np.stack([q, k, v], axis=2)
    np.testing.assert_array_equal(fa.flash_attn_qkvpacked_func(qkv_packed, causal=True), wanted[0])
    flat, cu = (x.reshape(12, 4, 8) for x in (q, k, v)), np.array([0, 6, 12], np.int32)
    packed = fa.flash_attn_varlen_func(*flat, cu, cu, 6, 6, causal=True)
    np.testing.assert_allclose(packed.reshape(q.shape), wanted[0], rtol=1e-6, atol=1e-6)
    for function, x in (
        (fa.flash_attn_varlen_qkvpacked_func, (qkv_packed.reshape(12, 3, 4, 8), cu, 6)),
        (fa.flash_attn_varlen_kvpacked_func, (q.reshape(12, 4, 8), kv.reshape(12, 2, 4, 8), cu, cu, 6, 6)),
    ):
        np.testing.assert_array_equal(function(*x, causal=True), packed)
    with pytest.raises(ValueError, match=r"^kv: "):
        fa.flash_attn_kvpacked_func(q, q)
    cuattn.set_seed(3)
    first = [fa.flash_attn_func(q, k, v, dropout_p=0.5) for _ in range(2)]
    cuattn.set_seed(3)
    np.testing.assert_array_equal(first[0], fa.flash_attn_func(q, k, v, dropout_p=0.5))
    assert (first[0] != first[1]).any()
    np.testing.assert_array_equal(
        fa.flash_attn_func(q, k, v, dropout_p=0.5, dropout_seed=8),
        cuattn.flash_attention(q, k, v, dropout_p=0.5, dropout_seed=8),
    )


def test_flash_attn_signatures() -> None:
    """flash-attn 2.8's names, order and defaults; dropout_seed is ours, by keyword."""
    from cuattn.interop import flash_attn as fa

    rest = {
        "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
        "alibi_slopes": None, "deterministic": False, "return_attn_probs": False,
    }  # fmt: skip
    lengths = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    for name, arrays in {
        "flash_attn_func": ("q", "k", "v"),
        "flash_attn_kvpacked_func": ("q", "kv"),
        "flash_attn_qkvpacked_func": ("qkv",),
        "flash_attn_varlen_func": ("q", "k", "v", *lengths),
        "flash_attn_varlen_kvpacked_func": ("q", "kv", *lengths),
        "flash_attn_varlen_qkvpacked_func": ("qkv", "cu_seqlens", "max_seqlen"),
    }.items():
        found = inspect.signature(getattr(fa, name)).parameters
        wanted = {**dict.fromkeys(arrays, inspect.Parameter.empty), **rest}
        wanted |= {"block_table": None} if name == "flash_attn_varlen_func" else {}
        assert {n: p.default for n, p in found.items()} == {**wanted, "dropout_seed": None}
        assert list(found) == [*wanted, "dropout_seed"]
        assert found["dropout_seed"].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize("kind", ["numpy", "torch", "jax", pytest.param("cupy", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("size", [1, 3, 16])
def test_flash_attn_pages(normal: Normal, size: int, kind: str) -> None:
    """block_table: the same as packed keys, whatever unused slots, pages and entries hold."""
    from cuattn.interop import flash_attn as fa

    make = {"numpy": "asarray", "torch": "from_numpy", "jax": "asarray", "cupy": "asarray"}[kind]
    to = getattr(pytest.importorskip("jax.numpy" if kind == "jax" else kind), make)
    lengths, rng = np.array([5, 0, 17]), np.random.default_rng(2)
    cu_q, cu_k = np.array([0, 2, 3, 9], np.int32), np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
    q, k, v = normal(9, 4, 8), normal(22, 2, 8), normal(22, 2, 6)
    wanted = fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 6, 17, causal=True, return_attn_probs=True)
    counts = -(-lengths // size)
    table = np.full((3, counts.max() + 1), -1, np.int32)
    pages = rng.permutation(counts.sum() + 2)
    k_pages, v_pages = (np.full((len(pages), size, *x.shape[1:]), np.nan, np.float32) for x in (k, v))
    for b, start in enumerate(cu_k[:-1]):
        table[b, : counts[b]], pages = pages[: counts[b]], pages[counts[b] :]
        for p in range(lengths[b]):
            for x, paged in ((k, k_pages), (v, v_pages)):
                paged[table[b, p // size], p % size] = x[start + p]
    given = [to(x) for x in (q, k_pages, v_pages, cu_q, cu_k)]
    found = fa.flash_attn_varlen_func(
        *given, 6, 17, causal=True, return_attn_probs=True, block_table=to(table)
    )
    assert type(found[0]) is type(given[0])
    for x, y in zip(found[:2], wanted[:2], strict=True):
        x = x.get() if kind == "cupy" else np.asarray(x)
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_wrong_pages(normal: Normal) -> None:
    from cuattn.interop import flash_attn as fa

    q, pages, cu = normal(3, 4, 8), normal(5, 2, 2, 8), np.array([0, 3], np.int32)
    for name, k, table in (
        ("k", normal(5, 2, 8), np.zeros((1, 2), np.int32)),
        ("v", normal(5, 3, 2, 8), np.zeros((1, 2), np.int32)),
        ("block_table", pages, np.zeros((2, 2), np.int32)),
        ("block_table", pages, np.zeros((1, 2), np.float32)),
        ("block_table", pages, np.zeros((1, 1), np.int32)),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: .*takes "):
            fa.flash_attn_varlen_func(q, k, pages, cu, cu, 3, 3, block_table=table)


OPTIONS = {
    "causal": [False, True],
    "window_size": [None, (3, 2)],
    "softcap": [0.0, 2.0],
    "q_offset": [None, 1, [0, 2]],
    "dropout_p": [0.0, 0.3],
    "layout": ["bshd", "bhsd"],
    "deterministic": [False, True],
}


def test_every_pair_of_options_is_a_valid_spec(normal: Normal) -> None:
    """No two options exclude each other."""
    given = qkv(normal)
    for (a, xs), (b, ys) in itertools.combinations(OPTIONS.items(), 2):
        for x, y in itertools.product(xs, ys):
            options = {a: x, b: y, "dropout_seed": 1}
            arrays = given
            if options.get("layout") == "bhsd":
                arrays = {n: z.transpose(0, 2, 1, 3) for n, z in given.items()}
            assert np.isfinite(cuattn.flash_attention(**arrays, **options, **REFERENCE)).all()
