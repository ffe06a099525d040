"""What differs between JAX releases (0.5 to 0.12), in one place: varying manual axes and shardings in types.

Knows neither attention nor XLA's binary interface.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec


def varying_axes(x: Any) -> frozenset[Any]:
    """The manual mesh axes over which a value inside ``shard_map`` varies; empty outside."""
    if not hasattr(jax, "typeof"):  # before 0.6: not tracked
        return frozenset()
    aval = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)  # 0.10 and newer
    if manual is not None:
        return frozenset(manual.varying)
    return frozenset(getattr(aval, "vma", None) or ())


def vary_alike(arrays: Sequence[Any]) -> list[Any]:
    """Cast arrays inside ``shard_map`` to one set of varying axes, as a primitive of ours needs."""
    found = [varying_axes(x) for x in arrays]
    union = frozenset[Any]().union(*found)
    cast = []
    for x, axes in zip(arrays, found, strict=True):
        missing = tuple(sorted(union - axes))
        cast.append(_cast(x, missing) if missing else x)
    return cast


def _cast(x: Any, axes: tuple[Any, ...]) -> Any:
    pcast = getattr(jax.lax, "pcast", None)
    return pcast(x, axes, to="varying") if pcast else jax.lax.pvary(x, axes)


def varying_over(arrays: Sequence[Any], axis_name: Any) -> list[Any]:
    """Cast arrays inside ``shard_map`` to vary over one more axis (or several)."""
    if not hasattr(jax, "typeof"):
        return list(arrays)
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    cast = []
    for x in arrays:
        missing = tuple(n for n in names if n not in varying_axes(x))
        changed = _cast(x, missing) if missing else x
        # where shard_map does not track them (check_vma=False) the cast's transpose would still sum
        cast.append(changed if varying_axes(changed).issuperset(names) else x)
    return cast


def axis_names(aval: Any) -> tuple[Any, ...]:
    """The explicit mesh axes of each dimension of an abstract value; all None outside explicit sharding."""
    sharding = getattr(aval, "sharding", None)
    spec = tuple(sharding.spec) if sharding is not None else ()
    return spec + (None,) * (len(aval.shape) - len(spec))


def result_like(aval: Any, shape: tuple[int, ...], dtype: Any, names: Sequence[Any]) -> Any:
    """The abstract value of a result: manual axes and mesh of ``aval``, ``names`` for its own dimensions."""
    kept = {}
    sharding = getattr(aval, "sharding", None)
    if sharding is not None:
        kept["sharding"] = NamedSharding(sharding.mesh, PartitionSpec(*names))
    return aval.update(shape=shape, dtype=dtype, weak_type=False, **kept)


def has_auto_axes(ctx: Any) -> bool:
    """Whether XLA's partitioner decides how what is lowered splits over several devices.

    False on one device and inside ``shard_map``; also where that leaves axes to the partitioner, since JAX's
    ``custom_partitioning`` cannot be used there.
    """
    context = ctx.module_context.axis_context
    if not hasattr(context, "num_devices") or context.num_devices == 1:
        return False
    return knows_sharding_rules() or not getattr(jax.config, "jax_use_shardy_partitioner", False)


def is_explicit(aval: Any) -> bool:
    """Whether a value's type says how it is sharded, over a mesh whose axes are all explicit."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or not hasattr(jax, "shard_map") or not hasattr(jax.sharding, "reshard"):
        return False
    return bool(getattr(sharding.mesh, "are_all_axes_explicit", False))


@functools.cache
def knows_sharding_rules() -> bool:
    """Whether ``custom_partitioning`` takes a function as Shardy's rule; GSPMD has no rule."""
    try:
        custom_partitioning(lambda x: x).def_partition(lambda *_: None, sharding_rule=lambda *_: "i -> i")
    except TypeError:
        return False
    return True


@functools.cache
def knows_replicated_factors() -> bool:
    """Whether such a rule can name what must not be split (newer than 0.7)."""
    return "need_replication_factors" in inspect.signature(custom_partitioning.def_partition).parameters


def lower_with_devices(*primitives: Any) -> None:
    """Have JAX know the devices when it lowers these primitives, for ``custom_partitioning`` needs them."""
    from jax._src import dispatch

    dispatch.prim_requires_devices_during_lowering.update(primitives)
