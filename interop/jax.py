"""``flash_attention`` on JAX arrays and tracers, and the drop-in for ``jax.nn.dot_product_attention``.

Binds the primitives to canonical operands (``jax_operands.py``). Must not know XLA's C structs
(``xla_ffi.py``) or rules of transformation (``jax_primitives.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from ..call import GRADIENTS, Gradients, check_wants
from ..errors import argument_error
from . import jax_primitives as primitives
from . import xla_ffi
from .jax_operands import array, canonical
from .jax_parallel import ring_attention, ulysses_attention, zigzag_order
from .jaxcompat import vary_alike


def flash_attention(named: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Any, Any]:
    """(out, lse) of ``cuattn.flash_attention`` or its varlen sibling, gathered by ``cuattn.api``."""
    arrays, call = canonical(named, options)
    return primitives.attend(arrays, call)


def flash_attention_vjp(
    named: Mapping[str, Any], options: Mapping[str, Any], return_lse: bool
) -> tuple[Any, Any]:
    """out or (out, lse), and the pullback of ``cuattn.flash_attention_vjp``."""
    arrays, call = canonical(named, options)
    out, lse = primitives.attend(arrays, call)
    return ((out, lse) if return_lse else out), _pullback(named, arrays, call, out, lse)


def _pullback(
    named: Mapping[str, Any], arrays: list[Any], call: primitives.Call, out: Any, lse: Any
) -> Callable[..., Gradients]:
    given = frozenset(name for name in GRADIENTS if name in call.names)

    def pullback(dout: Any, dlse: Any = None, *, wants: Any = None) -> Gradients:
        """Gradients of sum(out · dout) + sum(lse · dlse); see ``cuattn.flash_attention_vjp``."""
        names = given if wants is None else check_wants(wants, given)
        incoming = []
        for name, x, like in (("dout", dout, out), ("dlse", dlse, lse)):
            if x is not None:
                x = array(name, x)
                if x.shape != like.shape:
                    raise argument_error(name, f"shape {x.shape}", str(like.shape))
                if x.dtype != like.dtype:
                    raise argument_error(name, f"dtype {x.dtype.name}", like.dtype.name, kind=TypeError)
            incoming.append(x)
        dout = jnp.zeros_like(out) if incoming[0] is None else incoming[0]
        ordered = tuple(name for name in GRADIENTS if name in names)
        everything = vary_alike([*arrays, out, lse, dout, *([] if incoming[1] is None else [incoming[1]])])
        dlse = None if incoming[1] is None else everything.pop()
        *operands, out_, lse_, dout = everything
        found = dict(
            zip(ordered, primitives.pull_back(operands, out_, lse_, dout, dlse, call, ordered), strict=True)
        )
        if "bias" in found:
            found["bias"] = found["bias"].reshape(jnp.shape(named["bias"]))
        return Gradients(*(found.get(name) for name in GRADIENTS))

    return pullback


WORDS = {
    "q": "query", "k": "key", "v": "value", "softmax_scale": "scale", "window_size": "local_window_size",
    "q_seqlens": "query_seq_lengths", "kv_seqlens": "key_value_seq_lengths",
}  # fmt: skip


@contextmanager
def _in_the_callers_words() -> Iterator[None]:
    """Errors name the drop-in's own arguments."""
    try:
        yield
    except (TypeError, ValueError) as error:
        name, separator, rest = str(error).partition(": got ")
        if not separator or name not in WORDS:
            raise
        raise type(error)(f"{WORDS[name]}{separator}{rest}") from None


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """A drop-in for ``jax.nn.dot_product_attention``: its signature, shapes, broadcasting, top-left causal.

    ``query`` (B, T, N, H) or (T, N, H), ``key`` and ``value`` (B, S, K, H) or (S, K, H), K dividing N;
    ``bias`` and ``mask`` broadcast to (B, N, T, S). Returns out, or (out, residual) with the LSE, (B, T, N)
    in query's dtype.

    It differs where JAX's own path is lossy: a query that sees no key gives 0 and a residual of -inf (JAX:
    the mean of the values), hidden NaN do not spread, value may have its own H, and the residual is
    differentiable. ``implementation`` is checked and otherwise not used: the kernels are cuattn's.
    """
    if implementation not in (None, "xla", "cudnn"):
        raise argument_error("implementation", repr(implementation), "None, 'xla' or 'cudnn'")
    given = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask}
    arrays = {name: jnp.asarray(x) for name, x in given.items() if x is not None}
    query = arrays["query"]
    for name in ("query", "key", "value"):
        if arrays[name].ndim != query.ndim or query.ndim not in (3, 4):
            raise argument_error(
                name, f"shape {arrays[name].shape}", "(batch, length, heads, dim) or (length, heads, dim)"
            )
    q, k, v = (x if x.ndim == 4 else x[None] for x in (arrays[n] for n in ("query", "key", "value")))
    named = {"q": q, "k": k, "v": v}
    if "bias" in arrays:
        named["bias"] = arrays["bias"].astype(bias_dtype(arrays["bias"].dtype, q.dtype))
    if "mask" in arrays:
        named["mask"] = arrays["mask"]
    for name, x in (("q_seqlens", query_seq_lengths), ("kv_seqlens", key_value_seq_lengths)):
        if x is not None:
            named[name] = jnp.asarray(x)
    window = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
    options = {"causal": is_causal, "window_size": window, "softmax_scale": scale, "q_offset": 0}
    with _in_the_callers_words():
        out, lse = flash_attention(named, options)
    residual = lse.swapaxes(1, 2).astype(q.dtype)
    if query.ndim == 3:
        out, residual = out[0], residual[0]
    return (out, residual) if return_residual else out


def bias_dtype(given: Any, dtype: Any) -> Any:
    """The dtype, of those that kernels take beside ``dtype``, that holds a bias of dtype ``given``."""
    return dtype if given == dtype or dtype == jnp.float64 else jnp.float32


def attention_fn(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    is_causal: bool = False,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
) -> Any:
    """For ``flax.nnx.MultiHeadAttention`` and ``flax.linen.MultiHeadDotProductAttention``.

    Shapes as in flax: (batch..., length, heads, dim); ``bias`` and ``mask`` broadcast to (batch..., heads,
    q_length, kv_length). Whatever ``precision`` says, float32 is float32-accurate and the softmax float32.
    Refuses what has no meaning here: attention weights (``module``), dropout that the batch shares, products
    of the caller's own (``linen``'s einsum classes).
    """
    for name, x in (
        ("qk_attn_weights_einsum", qk_attn_weights_einsum),
        ("attn_weights_value_einsum", attn_weights_value_einsum),
    ):
        if x is not None:
            raise argument_error(name, "a product of the layer's own", "None: the kernels have theirs")
    if module is not None:
        raise argument_error(
            "module", "a module to sow attention weights into", "None: weights are never in memory"
        )
    rate = 0.0 if deterministic else dropout_rate
    if rate and broadcast_dropout:
        raise argument_error(
            "broadcast_dropout", "True with dropout", "False: each batch entry and head drops its own"
        )
    if rate and dropout_rng is None:
        raise argument_error("dropout_rng", "None with dropout", "a key")
    q, k, v = (x if dtype is None else jnp.asarray(x, dtype) for x in (query, key, value))
    common = jnp.result_type(q, k, v)
    lead = q.shape[:-3]
    named = {n: x.astype(common).reshape(-1, *x.shape[-3:]) for n, x in (("q", q), ("k", k), ("v", v))}
    for name, x in (("bias", bias), ("mask", mask)):
        if x is not None:
            x = jnp.asarray(x)
            x = x.astype(bool) if name == "mask" else x.astype(bias_dtype(x.dtype, common))
            if x.ndim > 3:
                full = (*lead, *x.shape[-3:])
                x = (jnp.broadcast_to(x, full) if x.shape[:-3] != (1,) * (x.ndim - 3) else x).reshape(
                    -1, *x.shape[-3:]
                )
            named[name] = x
    options: dict[str, Any] = {"causal": is_causal, "q_offset": 0, "dropout_p": rate}
    if rate:
        named["dropout_seed"] = jax.random.bits(dropout_rng, (), "uint32")
    with _in_the_callers_words():
        out, _ = flash_attention(named, options)
    return out.reshape(*lead, *out.shape[1:])


def register() -> None:
    """Register the handlers for this machine's platforms: before running a program read by ``jax.export``."""
    for platform in {device.platform for device in jax.devices()} | {"cpu"}:
        if platform in ("cpu", "gpu", "cuda"):
            xla_ffi.register("cpu" if platform == "cpu" else "cuda")


__all__ = [
    "attention_fn",
    "dot_product_attention",
    "flash_attention",
    "flash_attention_vjp",
    "register",
    "ring_attention",
    "ulysses_attention",
    "zigzag_order",
]
