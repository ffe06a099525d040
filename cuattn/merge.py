"""Combine attention over disjoint sets of keys into attention over all of them, exactly. No launches."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from . import arrays
from .errors import argument_error


def merge_attention(outs: Sequence[Any], lses: Sequence[Any]) -> tuple[Any, Any]:
    """Attention over the union of disjoint key sets from that over each.

    ``outs``: arrays (batch, seqlen_q, heads, head_dim_v) of one dtype; ``lses``: their LSEs, natural log,
    (batch, heads, seqlen_q), float32 or float64. NumPy, CuPy, JAX (differentiable) or DLPack arrays.

    Returns (out, lse) of the same shapes and dtypes. A row that is empty in every part gives 0 and −inf.
    Raises ``ValueError`` when counts or shapes differ. Source: the split-K combination of Dao, Haziza,
    Massa, Sizov, "Flash-Decoding", 2023.
    """
    outs, lses = list(outs), list(lses)
    if not outs or len(outs) != len(lses):
        raise argument_error(
            "lses", f"{len(lses)} arrays", f"as many as outs, which has {len(outs)}, one at least"
        )
    home = arrays.library_of("outs", outs[0])
    adopted = [[arrays.adopt(name, x) for x in group] for name, group in (("outs", outs), ("lses", lses))]
    libraries = {library for group in adopted for library, _ in group}
    if len(libraries) != 1:
        raise argument_error("outs", " and ".join(sorted(libraries)) + " arrays", "arrays of one library")
    outs, lses = ([x for _, x in group] for group in adopted)
    _check(outs, lses)
    library = libraries.pop()
    xp = import_module("jax.numpy" if library == "jax" else library)
    out, lse = _merge(xp, outs, lses)
    return arrays.give_back(out, home), arrays.give_back(lse, home)


def _check(outs: list[Any], lses: list[Any]) -> None:
    shape = outs[0].shape
    if len(shape) != 4:
        raise argument_error("outs", f"shape {shape}", "(batch, seqlen_q, heads, head_dim_v)")
    for x in outs:
        if x.shape != shape or x.dtype != outs[0].dtype:
            raise argument_error("outs", f"{x.dtype} {x.shape}", f"{outs[0].dtype} {shape} like the first")
    wanted = (shape[0], shape[2], shape[1])
    for x in lses:
        if x.shape != wanted or x.dtype != lses[0].dtype or x.dtype.name not in ("float32", "float64"):
            raise argument_error("lses", f"{x.dtype} {x.shape}", f"float32 or float64 {wanted}")


def _merge(xp: Any, outs: list[Any], lses: list[Any]) -> tuple[Any, Any]:
    work = lses[0].dtype
    stacked = xp.stack(lses)
    top = stacked.max(axis=0)
    if xp.__name__ == "jax.numpy":
        top = import_module("jax").lax.stop_gradient(top)
    top = xp.where(xp.isinf(top) & (top < 0), xp.zeros((), work), top)
    exps = xp.exp(stacked - top)
    total = exps.sum(axis=0)
    empty = total == 0
    total = xp.where(empty, xp.ones((), work), total)
    weights = exps / total
    merged = sum(w.transpose(0, 2, 1)[..., None] * x.astype(work) for w, x in zip(weights, outs, strict=True))
    lse = xp.where(empty, xp.asarray(-xp.inf, work), top + xp.log(total))
    return merged.astype(outs[0].dtype), lse
