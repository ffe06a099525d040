"""flash-attn 2.8's functions by name and signature, on any kind of array: a drop-in for its import line.

Nothing here but the translation of arguments: all work is ``cuattn``'s own.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .. import api, arrays, seeds
from ..errors import argument_error


def _options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Any,
    deterministic: bool,
    dropout_seed: Any,
) -> dict[str, Any]:
    """The keyword arguments that dense and packed calls share."""
    if dropout_p and dropout_seed is None:
        dropout_seed = seeds.draw()
    return {
        "dropout_p": dropout_p,
        "dropout_seed": dropout_seed,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": tuple(window_size),
        "softcap": max(softcap, 0.0),  # flash-attn: 0 and below mean none
        "alibi_slopes": alibi_slopes,
        "deterministic": deterministic,
        "return_lse": True,
    }


def _result(found: tuple[Any, Any], return_attn_probs: bool) -> Any:
    out, lse = found
    return (out, lse, None) if return_attn_probs else out


def _unpack(name: str, packed: Any, axis: int, count: int) -> list[Any]:
    """q, k, v or k, v out of a packed array, as views."""
    if packed.ndim != axis + 3 or packed.shape[axis] != count:
        raise argument_error(
            name, f"shape {tuple(packed.shape)}", f"{count} in axis {axis} of {axis + 3} axes"
        )
    lead = (slice(None),) * axis
    return [packed[(*lead, i)] for i in range(count)]


def _gather_pages(
    k: Any, v: Any, cu_seqlens_k: Any, max_seqlen_k: int, block_table: Any
) -> tuple[Any, Any, Any]:
    """Packed k and v out of pages, with room for the longest sequences: nothing waits for a GPU."""
    given = {"k": k, "v": v, "cu_seqlens_k": cu_seqlens_k, "block_table": block_table}
    adopted = {name: arrays.adopt(name, x) for name, x in given.items()}
    libraries = {name: library for name, (library, _) in adopted.items()}
    for name, library in libraries.items():
        if library != libraries["k"]:
            raise argument_error(name, f"a {library} array", f"an array like k: {libraries['k']}")
    pages, values, starts, table = (x for _, x in adopted.values())
    if pages.ndim != 4 or values.shape[:3] != pages.shape[:3]:
        name, shape = ("k", pages.shape) if pages.ndim != 4 else ("v", values.shape)
        raise argument_error(name, f"shape {shape}", "(pages, page size, heads, head_dim) with block_table")
    batch = starts.shape[0] - 1
    if table.ndim != 2 or table.shape[0] != batch or table.dtype.kind not in "iu":
        raise argument_error("block_table", f"{table.dtype} {table.shape}", f"ints ({batch}, pages of each)")
    size, xp = pages.shape[1], import_module("jax.numpy" if libraries["k"] == "jax" else libraries["k"])
    if xp.__name__ == "numpy" and batch and (starts[1:] - starts[:-1]).max() > table.shape[1] * size:
        raise argument_error("block_table", f"{table.shape[1]} pages of {size}", "room for each sequence")
    if not batch or not table.shape[1] or not pages.shape[0]:
        return pages.reshape(-1, *pages.shape[2:])[:0], values.reshape(-1, *values.shape[2:])[:0], starts
    row = xp.arange(batch * int(max_seqlen_k))
    sequence = xp.minimum(xp.searchsorted(starts[1:], row, side="right"), batch - 1)
    position = xp.maximum(row - starts[sequence], 0)
    page = table[sequence, xp.minimum(position // size, table.shape[1] - 1)]
    at = xp.clip(page, 0, pages.shape[0] - 1), position % size  # rows behind the last sequence are not read
    return pages[at], values[at], starts


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    dropout_seed: Any = None,
) -> Any:
    """``flash_attn.flash_attn_func``: q (batch, seqlen_q, heads, head_dim), k and v with their own heads.

    Returns out, or (out, lse, None) with ``return_attn_probs``: probabilities are not offered. Causal is
    bottom-right. Without ``dropout_seed`` a seed is drawn from ``cuattn.set_seed``'s generator.
    """
    options = _options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, dropout_seed
    )
    return _result(api.flash_attention(q, k, v, **options), return_attn_probs)


def flash_attn_kvpacked_func(
    q: Any,
    kv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    dropout_seed: Any = None,
) -> Any:
    """``flash_attn.flash_attn_kvpacked_func``: kv (batch, seqlen_kv, 2, heads_kv, head_dim); as above."""
    k, v = _unpack("kv", kv, 2, 2)
    return flash_attn_func(
        q, k, v,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, dropout_seed=dropout_seed,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    dropout_seed: Any = None,
) -> Any:
    """``flash_attn.flash_attn_qkvpacked_func``: qkv (batch, seqlen, 3, heads, head_dim); then as above."""
    q, k, v = _unpack("qkv", qkv, 2, 3)
    return flash_attn_func(
        q, k, v,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, dropout_seed=dropout_seed,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
    *,
    dropout_seed: Any = None,
) -> Any:
    """``flash_attn.flash_attn_varlen_func``: q (total_q, heads, head_dim), k and v (total_k, …).

    With ``block_table`` ((batch, pages) ints) k and v are pages (pages, page size ≥ 1, heads, head_dim), and
    position p of sequence b is in page ``block_table[b, p // size]``. They are gathered into a copy of
    batch · max_seqlen_k rows at most.
    """
    if block_table is not None:
        k, v, cu_seqlens_k = _gather_pages(k, v, cu_seqlens_k, max_seqlen_k, block_table)
    options = _options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, dropout_seed
    )
    lengths = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
    }
    return _result(api.flash_attention_varlen(q, k, v, **lengths, **options), return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Any,
    kv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    dropout_seed: Any = None,
) -> Any:
    """``flash_attn.flash_attn_varlen_kvpacked_func``: kv (total_k, 2, heads_kv, head_dim)."""
    k, v = _unpack("kv", kv, 1, 2)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, dropout_seed=dropout_seed,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Any,
    cu_seqlens: Any,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    dropout_seed: Any = None,
) -> Any:
    """``flash_attn.flash_attn_varlen_qkvpacked_func``: qkv (total, 3, heads, head_dim)."""
    q, k, v = _unpack("qkv", qkv, 1, 3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, dropout_seed=dropout_seed,
    )  # fmt: skip
