"""The public functions. Each body is the walk: adopt the arrays, bind the spec, run, give back."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from . import arrays, call
from .call import Gradients
from .errors import argument_error
from .spec import LAYOUTS

Pullback = Callable[..., Gradients]


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    q_seqlens: Any = None,
    kv_seqlens: Any = None,
    q_offset: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: Any = None,
    layout: str = "bshd",
    return_lse: bool = False,
    deterministic: bool = False,
    precision: str | None = None,
    backend: str | None = None,
) -> Any:
    """Exact attention, softmax(scale q kᵀ) v, in memory that grows with the sequence, not with its square.

    Shapes, with ``layout="bshd"`` (``"bhsd"`` swaps seqlen and heads):

    - ``q``: (batch, seqlen_q, heads_q, head_dim), ``k``: (batch, seqlen_kv, heads_kv, head_dim), ``v``:
      (batch, seqlen_kv, heads_kv, head_dim_v). heads_kv divides heads_q; head dims are 1 to 256. One dtype of
      float16, bfloat16, float32, float64; any strides. NumPy, CuPy, JAX or DLPack arrays.
    - ``bias`` (q's dtype or float32, added) and ``mask`` (bool, True = attend): any shape that broadcasts to
      (batch, heads_q, seqlen_q, seqlen_kv). ``alibi_slopes``: (heads_q,) or (batch, heads_q), ``sinks``:
      (heads_q,), both float32 (float64 with float64 inputs). Segment ids: (batch, seqlen) ints.
      ``q_seqlens``, ``kv_seqlens``: (batch,) ints, the real lengths.

    A score goes through: scale · q·k → ``softcap`` c: c·tanh(s/c) → + bias → − slope·|i + q_offset − j| →
    masks → softmax, a sink taking part as an extra logit → dropout → · v. ``causal``: row i sees keys
    j ≤ i + q_offset, where ``q_offset`` (an int or (batch,) ints) defaults to seqlen_kv − seqlen_q, the
    bottom-right corner; 0 is the top-left one. ``window_size`` (left, right) counts keys before and after
    that diagonal, its own included in both; −1 or None is open. ``softmax_scale`` defaults to 1/√head_dim.
    A row that sees no key gives 0 and an LSE of −inf.

    ``dropout_p`` in [0, 1) needs ``dropout_seed`` (an int; in JAX also a traced scalar): same seed, same
    mask, on every backend. ``deterministic``: the same inputs give the same bits. ``precision`` is for
    float32 on the GPU: ``"highest"`` (default), ``"tf32"``, ``"bf16"``. ``backend``: None picks by where the
    arrays live; ``"cuda"``, ``"numba"``, ``"reference"`` force one.

    Returns out (q's shape with head_dim_v last), or (out, lse) with ``return_lse``: the natural log of each
    row's sum of exponentials, float32 (float64 for float64), (batch, heads_q, seqlen_q).

    Raises ``ValueError`` or ``TypeError`` naming the argument, ``BackendUnavailable`` saying what to install.

    Algorithm: Dao, "FlashAttention-2: Faster attention with better parallelism and work partitioning", 2023.
    """
    return _forward(locals())


def flash_attention_vjp(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Pullback]:
    """``flash_attention`` and its pullback, for arrays without autograd; the same arguments.

    Returns (out, pullback), or ((out, lse), pullback) with ``return_lse``. ``pullback(dout, dlse=None,
    *, wants=None)`` takes the gradients of out and lse (shapes of out and lse, any strides, either may be
    None) and returns ``Gradients(dq, dk, dv, dbias, dsinks)``, None where the input was not given. ``wants``
    names those to compute ("q", "k", "v", "bias", "sinks"); work for the others is not done.
    """
    return _vjp(_defaults(flash_attention, q, k, v, options))


def flash_attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    q_offset: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: Any = None,
    return_lse: bool = False,
    deterministic: bool = False,
    precision: str | None = None,
    backend: str | None = None,
) -> Any:
    """``flash_attention`` over sequences packed end to end.

    ``q``: (total_q, heads_q, head_dim), ``k``: (total_k, heads_kv, head_dim), ``v``: (total_k, heads_kv,
    head_dim_v). Sequence b is rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` and keys
    ``cu_seqlens_k[b]`` to ``cu_seqlens_k[b + 1]`` ((batch + 1,) ints, from 0, not decreasing; empty sequences
    are allowed). The arrays may be longer: rows behind the last sequence get out 0, LSE −inf and gradients 0,
    whatever they hold. ``max_seqlen_q`` and ``max_seqlen_k``: the longest sequences; None looks them up (on
    a GPU that waits for the device). Causal is bottom-right in each sequence; other arguments as in
    ``flash_attention``.

    Returns out (total_q, heads_q, head_dim_v), or (out, lse) with lse (heads_q, total_q).
    """
    return _forward(locals())


def flash_attention_varlen_vjp(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Pullback]:
    """``flash_attention_varlen`` and its pullback; see ``flash_attention_vjp``."""
    return _vjp(_defaults(flash_attention_varlen, q, k, v, options))


_ARRAYS = (
    "q", "k", "v", "bias", "mask", "alibi_slopes", "sinks", "q_segment_ids", "kv_segment_ids",
    "q_seqlens", "kv_seqlens", "cu_seqlens_q", "cu_seqlens_k", "dropout_seed",
)  # fmt: skip
_NOT_OPTIONS = frozenset((*_ARRAYS, "q_offset", "return_lse", "backend"))


def _gather(arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays by name, and the options of ``spec.bind``."""
    named = {name: arguments[name] for name in _ARRAYS if arguments.get(name) is not None}
    options = {name: x for name, x in arguments.items() if name not in _NOT_OPTIONS}
    if "cu_seqlens_q" in arguments:
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            if name not in named:
                raise argument_error(name, "None", "(batch + 1,) ints", kind=TypeError)
        options["layout"] = "thd"
    elif arguments["layout"] not in LAYOUTS:
        raise argument_error("layout", repr(arguments["layout"]), " or ".join(map(repr, LAYOUTS)))
    offset = arguments["q_offset"]
    if offset is None or (
        hasattr(offset, "__index__") and getattr(offset, "ndim", 0) == 0 and not arrays.is_jax(offset)
    ):
        options["q_offset"] = offset
    else:
        named["q_offset"] = offset
    if arguments["dropout_p"] == 0:
        named.pop("dropout_seed", None)
    return named, options


def _defaults(function: Callable[..., Any], q: Any, k: Any, v: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``function`` with its defaults filled in."""
    defaults = function.__kwdefaults__ or {}
    names = function.__code__.co_varnames[3 : 3 + function.__code__.co_kwonlyargcount]
    unknown = set(given) - set(names)
    missing = [name for name in names if name not in defaults and name not in given]
    if unknown or missing:
        problem = (
            f"unexpected keyword argument {sorted(unknown)[0]!r}" if unknown else f"missing {missing[0]!r}"
        )
        raise TypeError(f"{function.__name__}_vjp() {problem}")
    return {"q": q, "k": k, "v": v, **{name: defaults.get(name) for name in names}, **given}


def _make(arguments: dict[str, Any]) -> call.Call | tuple[dict[str, Any], dict[str, Any]]:
    """The call of NumPy or CuPy arrays; (arrays, options) of JAX ones."""
    made = call.repeat(arguments)
    if made is None:
        named, options = _gather(arguments)
        if any(map(arrays.is_jax, named.values())):
            return named, {**options, "backend": arguments["backend"]}
        made = call.make(named, options, arguments["backend"])
        call.remember(arguments, made)
    return made


def _jax() -> Any:
    return import_module(".interop.jax", __package__)


def _forward(arguments: dict[str, Any]) -> Any:
    made = _make(arguments)
    if isinstance(made, tuple):
        out, lse = _jax().flash_attention(*made)
        return (out, lse) if arguments["return_lse"] else out
    out, lse = made.forward()
    return (made.give_back(out), made.give_back(lse)) if arguments["return_lse"] else made.give_back(out)


def _vjp(arguments: dict[str, Any]) -> tuple[Any, Pullback]:
    made, return_lse = _make(arguments), arguments["return_lse"]
    if isinstance(made, tuple):
        return _jax().flash_attention_vjp(*made, return_lse)
    out, lse = made.forward()
    given = call.wanted(made)

    def pullback(dout: Any, dlse: Any = None, *, wants: Any = None) -> Gradients:
        """Gradients of sum(out · dout) + sum(lse · dlse); see ``flash_attention_vjp``."""
        names = given if wants is None else call.check_wants(wants, given)
        found = made.backward(out, lse, *made.incoming(dout, dlse), names)
        return Gradients(*(made.give_back(found[f"d{n}"]) if n in names else None for n in call.GRADIENTS))

    home_out, home_lse = made.give_back(out), made.give_back(lse)
    return ((home_out, home_lse) if return_lse else home_out), pullback
