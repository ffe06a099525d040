"""Attention as three JAX primitives: forward, its tangent (linear; transposed only) and backward.

Batching folds mapped axes into the batch; lowering picks the backend's program for the platform. Takes
canonical operands from ``interop/jax.py``; must not validate, nor know kernels or C structs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..errors import BackendUnavailable, argument_error
from ..program import Program
from ..spec import GRADIENTS, AttentionSpec, Signature, bind, row_major
from . import jax_sharding, xla_ffi
from .adapters import alignment
from .jaxcompat import axis_names, has_auto_axes, is_explicit, lower_with_devices, result_like

OUT_NAME, LSE_NAME = "cuattn_out", "cuattn_lse"  # for jax.checkpoint policies
DIFFERENTIABLE = (*GRADIENTS, "softmax_scale")
OPERANDS = (
    "q", "k", "v", "bias", "mask", "alibi_slopes", "sinks", "q_segment_ids", "kv_segment_ids", "q_seqlens",
    "kv_seqlens", "q_offset", "cu_seqlens_q", "cu_seqlens_k", "dropout_seed", "softmax_scale",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Call:
    """What a primitive is bound with: the operands' names in order and ``spec.bind``'s options."""

    names: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]
    backend: str | None = None

    def spec(self, avals: Sequence[Any]) -> AttentionSpec:
        """The spec for operands of these shapes; raises as ``spec.bind`` does."""
        shapes = tuple((tuple(a.shape), np.dtype(a.dtype).name) for a in avals[: len(self.names)])
        return _spec(self.names, shapes, self.options)


@functools.lru_cache(maxsize=4096)
def _spec(
    names: tuple[str, ...], arrays: tuple[Any, ...], options: tuple[tuple[str, Any], ...]
) -> AttentionSpec:
    signatures = {}
    for name, (shape, dtype) in zip(names, arrays, strict=True):
        strides = row_major(shape)
        itemsize = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
        signatures[name] = Signature(dtype, shape, strides, alignment(0, strides, itemsize))
    if "dropout_seed" in signatures:  # pairs of 32-bit words: JAX may lack int64
        signatures["dropout_seed"] = Signature("int64", (5,), (1,))
    return bind(signatures, **dict(options))


def attend(arrays: Sequence[Any], call: Call) -> tuple[Any, Any]:
    """(out, lse) of canonical operands in the order of ``call.names``."""
    out, lse = forward_p.bind(*arrays, call=call)
    return out, lse


def pull_back(
    arrays: Sequence[Any], out: Any, lse: Any, dout: Any, dlse: Any | None, call: Call, wants: tuple[str, ...]
) -> list[Any]:
    """Gradients of the operands named in ``wants`` (out of ``GRADIENTS``), in that order."""
    incoming = (dout,) if dlse is None else (dout, dlse)
    return list(backward_p.bind(*arrays, out, lse, *incoming, call=call, wants=wants, dlse=dlse is not None))


# ----------------------------------------------------------------------------------------- abstract values
def _out_avals(call: Call, avals: Sequence[Any]) -> tuple[Any, Any]:
    spec, q = call.spec(avals), avals[0]
    names = axis_names(q)
    jax_sharding.refuse_sharded_sequences(
        (role, axis_names(x), jax_sharding.axes_of(role, x.shape, spec.layout))
        for role, x in zip("qk", avals, strict=False)
    )
    out_names: tuple[Any, ...]
    lse_names: tuple[Any, ...]
    if spec.layout == "thd":
        out_names, lse_names = (*names[:2], None), (names[1], names[0])
    else:
        b, x, y = names[:3]
        out_names, lse_names = (b, x, y, None), ((b, x, y) if spec.layout == "bhsd" else (b, y, x))
    return (
        result_like(q, spec.out_shape, q.dtype, out_names),
        result_like(q, spec.lse_shape, np.dtype(spec.accumulator), lse_names),
    )


def _forward_avals(*avals: Any, call: Call) -> tuple[Any, Any]:
    return _out_avals(call, avals)


def _tangent_avals(*avals: Any, call: Call, wants: tuple[str, ...]) -> tuple[Any, Any]:
    return _out_avals(call, avals)


def _backward_avals(*avals: Any, call: Call, wants: tuple[str, ...], dlse: bool) -> tuple[Any, ...]:
    return tuple(avals[call.names.index(name)].update(weak_type=False) for name in wants)


# --------------------------------------------------------------------------------------------- derivatives
def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call) -> tuple[Any, Any]:
    out, lse = forward_p.bind(*primals, call=call)
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    given = {n: t for n, t in zip(call.names, tangents, strict=True) if type(t) is not ad.Zero}
    given = {n: t for n, t in given.items() if getattr(t, "dtype", None) != jax.dtypes.float0}
    if "alibi_slopes" in given:
        raise argument_error(
            "alibi_slopes", "a value that is differentiated", "constants; wrap it in jax.lax.stop_gradient",
            kind=NotImplementedError,
        )  # fmt: skip
    wants = tuple(n for n in DIFFERENTIABLE if n in given)
    if not wants:
        return (out, lse), tuple(ad.Zero(jax.core.get_aval(x).to_tangent_aval()) for x in (out, lse))
    dots = tangent_p.bind(*primals, out, lse, *(given[n] for n in wants), call=call, wants=wants)
    return (out, lse), tuple(dots)


def _transpose(cotangents: Sequence[Any], *args: Any, call: Call, wants: tuple[str, ...]) -> list[Any]:
    dout, dlse = cotangents
    arrays, (out, lse) = args[: len(call.names)], args[len(call.names) :][:2]
    nothing: list[Any] = [None] * (len(arrays) + 2)
    if type(dout) is ad.Zero and type(dlse) is ad.Zero:
        return nothing + [None] * len(wants)
    if type(dout) is ad.Zero:
        dout = jnp.zeros_like(out)
    dlse = None if type(dlse) is ad.Zero else dlse
    asked = tuple(n for n in GRADIENTS if n in wants or (n == "q" and "softmax_scale" in wants))
    found = dict(zip(asked, pull_back(arrays, out, lse, dout, dlse, call, asked), strict=True))
    if "softmax_scale" in wants:  # dq = scale * sum of dS k, so q · dq / scale is the scale's share
        q, scale = arrays[0], arrays[call.names.index("softmax_scale")]
        total = jnp.sum(q.astype(lse.dtype) * found["q"].astype(lse.dtype)).astype(scale.dtype)
        found["softmax_scale"] = total / scale
    return nothing + [found[n] for n in wants]


def _no_forward_mode(*args: Any, **params: Any) -> Any:
    raise NotImplementedError(
        "cuattn.flash_attention has no forward-mode derivative (jax.jvp, jax.jacfwd, jax.hessian); "
        "use jax.grad, jax.vjp or jax.jacrev, or jax.nn.dot_product_attention where forward mode is needed"
    )


def _no_second_derivative(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    raise NotImplementedError(
        "cuattn.flash_attention has first derivatives only; for second ones use jax.nn.dot_product_attention"
    )


# ------------------------------------------------------------------------------------------------ batching
_PER_ENTRY = (
    "q", "k", "v", "out", "lse", "dout", "dlse", "q_segment_ids", "kv_segment_ids", "q_seqlens", "kv_seqlens",
    "q_offset",
)  # fmt: skip
_WHOLE = ("sinks", "softmax_scale", "dropout_seed", "cu_seqlens_q", "cu_seqlens_k")


def _lead(x: Any, dim: int | None, n: int) -> Any:
    """x with the mapped axis first, broadcast over it if it was not mapped."""
    return jnp.broadcast_to(x, (n, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)


def _merge(x: Any) -> Any:
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _fold(role: str, x: Any, dim: int | None, n: int, batch: int, spread: bool) -> Any:
    """One operand of n mapped problems as that of a single problem of batch n * batch."""
    if role in _WHOLE:
        return x
    if role in _PER_ENTRY:
        return _merge(_lead(x, dim, n))
    if (
        dim is None
        and not spread
        and ((role == "alibi_slopes" and x.ndim == 1) or (role != "alibi_slopes" and x.shape[0] == 1))
    ):
        return x  # broadcast over the batch: stays shared
    x = _lead(x, dim, n)
    if role == "alibi_slopes" and x.ndim == 2:
        x = x[:, None]
    return _merge(jnp.broadcast_to(x, (n, batch, *x.shape[2:])))


def _batched(
    primitive: Any,
    extra: Callable[[dict[str, Any]], tuple[str, ...]],
    args: Sequence[Any],
    dims: Sequence[Any],
    **params: Any,
) -> tuple[list[Any], list[int]]:
    """Bind a primitive under vmap: fold the mapped axis into the batch, or map where that cannot be."""
    call: Call = params["call"]
    wants: tuple[str, ...] = params.get("wants", ())
    roles = call.names + extra(params)
    n = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    mapped = {r for r, d in zip(roles, dims, strict=True) if d is not None}
    whole = mapped & set(_WHOLE) or "dropout_seed" in roles or "cu_seqlens_q" in roles
    if whole or (primitive is backward_p and "sinks" in wants):
        return _one_by_one(functools.partial(primitive.bind, **params), args, dims)
    batch = args[0].shape[0 if dims[0] is None else (1 if dims[0] == 0 else 0)]
    # A bias gradient must not be summed over the mapped axis, unless neither bias nor its tangent is mapped.
    spread = "bias" in wants and (primitive is backward_p or "bias" in mapped)
    folded = [
        _fold(role, x, d, n, batch, spread and role == "bias")
        for role, x, d in zip(roles, args, dims, strict=True)
    ]
    found = primitive.bind(*folded, **params)
    outs = []
    for i, x in enumerate(found):
        x = x.reshape(n, x.shape[0] // n if n else batch, *x.shape[1:])
        if primitive is backward_p and wants[i] == "bias":
            at = call.names.index("bias")
            shape = list(args[at].shape)
            if dims[at] is not None:
                del shape[dims[at]]
            if shape[0] != batch:
                x = x.sum(axis=1, keepdims=True, dtype=_wide(x.dtype)).astype(x.dtype)
        outs.append(x)
    return outs, [0] * len(outs)


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _one_by_one(
    function: Callable[..., Any], args: Sequence[Any], dims: Sequence[Any]
) -> tuple[list[Any], list[int]]:
    """Map with a loop: for operands that no one call can hold, and for dropout, which counts from batch 0."""
    leading = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
    moving = [x for x, d in zip(leading, dims, strict=True) if d is not None]

    def one(slices: list[Any]) -> list[Any]:
        rest = iter(slices)
        return list(function(*(x if d is None else next(rest) for x, d in zip(leading, dims, strict=True))))

    outs = jax.lax.map(one, moving)
    return outs, [0] * len(outs)


def _forward_extra(params: dict[str, Any]) -> tuple[str, ...]:
    return ()


def _tangent_extra(params: dict[str, Any]) -> tuple[str, ...]:
    return ("out", "lse", *params["wants"])


def _backward_extra(params: dict[str, Any]) -> tuple[str, ...]:
    return ("out", "lse", "dout", "dlse") if params["dlse"] else ("out", "lse", "dout")


# ------------------------------------------------------------------------------------------------ lowering
_FORWARD_RESULTS: tuple[str, ...] = ("out", "lse")


def _lower(platform: str, primitive: Any, ctx: Any, *operands: Any, **params: Any) -> Any:
    if not has_auto_axes(ctx):
        return _lower_whole(platform, ctx, *operands, **params)
    call: Call = params["call"]
    if params.get("wants") is None:
        roles, results = call.names, _FORWARD_RESULTS
    else:
        roles = call.names + _backward_extra(params)
        results = tuple(f"d{name}" for name in params["wants"])
    layout = dict(call.options).get("layout", "bshd")
    if is_explicit(ctx.avals_in[0]):
        function = jax_sharding.over_explicit_mesh(
            primitive, params, roles, results, layout, ctx.avals_in, ctx.avals_out
        )
    else:
        function = jax_sharding.split(primitive, params, roles, results, layout)
    return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)


def _lower_whole(platform: str, ctx: Any, *operands: Any, **params: Any) -> Any:
    """Lower for one device, or for one shard."""
    call: Call = params["call"]
    wants: tuple[str, ...] | None = params.get("wants")
    backward = wants is not None
    spec = call.spec(ctx.avals_in)
    if backward:
        spec = replace(spec, dlse=params["dlse"])
    roles = call.names + (_backward_extra(params) if backward else ())
    if spec.empty:
        return mlir.lower_fun(functools.partial(_nothing, ctx.avals_out, backward), multiple_results=True)(
            ctx, *operands
        )
    backend = call.backend or {"cpu": "numba", "cuda": "cuda"}.get(platform)
    if backend == "reference":
        function = functools.partial(_callback, spec, wants, roles, ctx.avals_out)
        return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)
    if (backend, platform) not in (("numba", "cpu"), ("cuda", "cuda")):
        if call.backend is None:
            raise BackendUnavailable(
                f"cuattn has no kernels for JAX's platform {platform!r}; it runs on cpu and cuda"
            )
        raise argument_error(
            "backend", f"{backend!r} with arrays on {platform}", "None, or 'reference' there"
        )
    encoded, inputs, outputs = encoded_program(platform, spec, wants)
    xla_ffi.resolve(encoded.kernels)
    target = xla_ffi.register(platform)
    at = [roles.index(name) for name in inputs]
    order = [outputs.index(name) for name in (("out", "lse") if wants is None else [f"d{n}" for n in wants])]
    scratch = [jax.core.ShapedArray((size,), np.dtype(np.uint8)) for size in encoded.workspace]
    avals_out: list[Any] = [None] * len(outputs)
    for position, aval in zip(order, ctx.avals_out, strict=True):
        avals_out[position] = aval
    inner = ctx.replace(avals_in=[ctx.avals_in[i] for i in at], avals_out=[*avals_out, *scratch])
    results = jax.ffi.ffi_lowering(target)(
        inner, *(operands[i] for i in at), plan=encoded.plan, kernels=encoded.kernels
    )
    return [results[position] for position in order]


@functools.lru_cache(maxsize=1024)
def encoded_program(
    platform: str, spec: AttentionSpec, wants: tuple[str, ...] | None
) -> tuple[xla_ffi.Encoded, tuple[str, ...], tuple[str, ...]]:
    """The backend's program for a platform, encoded, with the names of its inputs and outputs."""
    program, arch = _program(platform, spec, wants)
    return xla_ffi.encode(program, arch), program.inputs, tuple(b.name for b in program.outputs)


def _program(platform: str, spec: AttentionSpec, wants: tuple[str, ...] | None) -> tuple[Program, int | None]:
    if platform == "cpu":
        from ..backends import numba as cpu

        if wants is None:
            return cpu.forward_program(spec), None
        return cpu.backward_program(spec, frozenset(wants)), None
    from .. import device as devices
    from ..backends import cuda

    device = devices.of_jax()
    if wants is None:
        return cuda.forward_program(spec, device), device.arch
    return cuda.backward_program(spec, device, frozenset(wants)), device.arch


def _nothing(avals: Sequence[Any], backward: bool, *operands: Any) -> list[Any]:
    """No queries or no keys: out and gradients are 0, LSE is -inf."""
    fill = [0.0] * len(avals) if backward else [0.0, -math.inf]
    return [jnp.full(a.shape, x, a.dtype) for a, x in zip(avals, fill, strict=True)]


def _callback(
    spec: AttentionSpec,
    wants: tuple[str, ...] | None,
    roles: tuple[str, ...],
    avals: Sequence[Any],
    *operands: Any,
) -> list[Any]:
    """The oracle, on the host."""
    names = ("out", "lse") if wants is None else tuple(f"d{n}" for n in wants)

    def run(*values: Any) -> tuple[Any, ...]:
        from ..backends import reference

        arrays = {name: np.asarray(x) for name, x in zip(roles, values, strict=True)}
        if "dropout_seed" in arrays:
            arrays["dropout_seed"] = np.ascontiguousarray(arrays["dropout_seed"]).view(np.int64)
        found = reference.prepare(spec, None, None if wants is None else frozenset(wants))(arrays)
        return tuple(found[name] for name in names)

    shapes = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals)
    return list(jax.pure_callback(run, shapes, *operands, vmap_method="sequential"))


# -------------------------------------------------------------------------------------------- registration
def _eager(primitive: Any) -> Callable[..., Any]:
    """Evaluate outside jit: compile once per set of parameters and shapes, as JAX's own primitives do."""

    @functools.lru_cache(maxsize=4096)
    def compiled(params: tuple[tuple[str, Any], ...]) -> Any:
        return jax.jit(functools.partial(primitive.bind, **dict(params)))

    def run(*args: Any, **params: Any) -> Any:
        with jax.disable_jit(False):
            return compiled(tuple(sorted(params.items())))(*args)

    return run


def _primitive(name: str, avals: Callable[..., Any], extra: Callable[..., Any]) -> Any:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(avals)
    batching.primitive_batchers[primitive] = functools.partial(_batched, primitive, extra)
    return primitive


forward_p = _primitive("cuattn_forward", _forward_avals, _forward_extra)
tangent_p = _primitive("cuattn_tangent", _tangent_avals, _tangent_extra)
backward_p = _primitive("cuattn_backward", _backward_avals, _backward_extra)
for _p in (forward_p, backward_p):
    _p.def_impl(_eager(_p))
    for _platform in ("cpu", "cuda"):
        mlir.register_lowering(_p, functools.partial(_lower, _platform, _p), platform=_platform)
    mlir.register_lowering(_p, functools.partial(_lower, "other", _p))
lower_with_devices(forward_p, backward_p)
tangent_p.def_impl(_no_forward_mode)
mlir.register_lowering(tangent_p, _no_forward_mode)
ad.primitive_jvps[forward_p] = _jvp
ad.primitive_jvps[backward_p] = _no_second_derivative
ad.primitive_transposes[tangent_p] = _transpose
