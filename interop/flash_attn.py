"""flash-attn 2.8's functions by name and signature, on any kind of array: a drop-in for its import line.

Nothing here but the translation of arguments: all work is ``cuattn``'s own.
"""

from __future__ import annotations

from typing import Any

from .. import api, seeds
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
        "softcap": softcap,
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


def flash_attn_kvpacked_func(q: Any, kv: Any, *args: Any, **kwargs: Any) -> Any:
    """``flash_attn.flash_attn_kvpacked_func``: kv (batch, seqlen_kv, 2, heads_kv, head_dim); as above."""
    return flash_attn_func(q, *_unpack("kv", kv, 2, 2), *args, **kwargs)


def flash_attn_qkvpacked_func(qkv: Any, *args: Any, **kwargs: Any) -> Any:
    """``flash_attn.flash_attn_qkvpacked_func``: qkv (batch, seqlen, 3, heads, head_dim); then as above."""
    return flash_attn_func(*_unpack("qkv", qkv, 2, 3), *args, **kwargs)


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

    Raises ``NotImplementedError`` for ``block_table``: paged keys come with the kv-cache function.
    """
    if block_table is not None:
        raise NotImplementedError("block_table: paged keys are not implemented yet; pass packed k and v")
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


def flash_attn_varlen_kvpacked_func(q: Any, kv: Any, *args: Any, **kwargs: Any) -> Any:
    """``flash_attn.flash_attn_varlen_kvpacked_func``: kv (total_k, 2, heads_kv, head_dim)."""
    return flash_attn_varlen_func(q, *_unpack("kv", kv, 1, 2), *args, **kwargs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Any, cu_seqlens: Any, max_seqlen: int, *args: Any, **kwargs: Any
) -> Any:
    """``flash_attn.flash_attn_varlen_qkvpacked_func``: qkv (total, 3, heads, head_dim)."""
    q, k, v = _unpack("qkv", qkv, 1, 3)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **kwargs)
