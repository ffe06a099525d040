"""How attention's primitives split over a mesh under ``jit``: by batch and heads, with no gathering.

For Shardy (a sharding rule) and GSPMD (callbacks) alike, through JAX's ``custom_partitioning``. A sequence
axis is never split here: that is ``jax_parallel.py``'s. Knows the operands' axes, not attention.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from ..errors import argument_error
from .jaxcompat import knows_replicated_factors, knows_sharding_rules

ADVICE = (
    "an unsharded sequence axis: shard batch or heads (jax.lax.with_sharding_constraint on q, k and v), or "
    "call ring_attention or ulysses_attention of cuattn.interop.jax inside jax.shard_map"
)
_AXES = {  # axes of each operand: batch, sequence of q (s) and k (t), heads of q (h) and k (n), others (-)
    "bshd": {"q": "bsh-", "k": "btn-", "v": "btn-", "out": "bsh-", "lse": "bhs"},
    "bhsd": {"q": "bhs-", "k": "bnt-", "v": "bnt-", "out": "bhs-", "lse": "bhs"},
    "thd": {"q": "sh-", "k": "tn-", "v": "tn-", "out": "sh-", "lse": "hs"},
}
_SMALL = {
    "sinks": "h", "q_segment_ids": "bs", "kv_segment_ids": "bt", "q_seqlens": "b", "kv_seqlens": "b",
    "q_offset": "b",
}  # fmt: skip
_ALIASES = {"dout": "out", "dlse": "lse", "dq": "q", "dk": "k", "dv": "v", "dbias": "bias", "dsinks": "sinks"}


def axes_of(role: str, shape: Sequence[int], layout: str) -> str:
    """One letter for each axis of an operand or result: see ``_AXES``."""
    role = _ALIASES.get(role, role)
    if role in _AXES[layout]:
        return _AXES[layout][role]
    if role in ("bias", "mask"):
        return "".join("-" if n == 1 else axis for axis, n in zip("bhst", shape, strict=True))
    if role == "alibi_slopes":
        return "bh"[-len(shape) :]
    return _SMALL.get(role, "-" * len(shape))


def refuse_sharded_sequences(named: Iterable[tuple[str, Sequence[Any], str]]) -> None:
    """Raise when the partition of an operand (name, entries, axes) splits its sequence axis."""
    for name, entries, axes in named:
        for entry, axis in zip(entries, axes, strict=False):
            if axis in "st" and entry:
                raise argument_error(name, f"its sequence axis sharded over {entry!r}", ADVICE)


def split(
    primitive: Any, params: dict[str, Any], roles: tuple[str, ...], results: tuple[str, ...], layout: str
) -> Callable[..., Any]:
    """The primitive as a function that XLA's partitioners split; operands and results in the given roles."""
    return _split(primitive, tuple(sorted(params.items())), roles, results, layout)


@functools.lru_cache(maxsize=1024)
def _split(
    primitive: Any, params: tuple[Any, ...], roles: tuple[str, ...], results: tuple[str, ...], layout: str
) -> Callable[..., Any]:
    whole = functools.partial(primitive.bind, **dict(params))

    def run(*operands: Any) -> Any:
        return tuple(whole(*operands))

    found = custom_partitioning(run)
    found.def_partition(
        partition=functools.partial(_partition, whole, roles, results, layout),
        infer_sharding_from_operands=functools.partial(_infer, roles, results, layout),
        sharding_rule=_for_shardy(roles, results, layout, ("s", "t")),
    )
    if "dout" in roles:
        return found
    guard = _guard(layout)

    def guarded(*operands: Any) -> Any:
        return found(*guard(*operands[:2]), *operands[2:])

    return guarded


@functools.lru_cache(maxsize=4)
def _guard(layout: str) -> Any:
    """The identity of q and k that fails when they arrive with a split sequence axis."""
    roles = ("q", "k")

    @custom_partitioning
    def same(q: Any, k: Any) -> Any:
        return q, k

    def partition(mesh: Any, args: Any, results: Any) -> Any:
        named = [(r, _entries(x), axes_of(r, x.shape, layout)) for r, x in zip(roles, args, strict=True)]
        refuse_sharded_sequences(named)
        shardings = tuple(NamedSharding(mesh, PartitionSpec(*entries)) for _, entries, _ in named)
        return mesh, lambda q, k: (q, k), shardings, shardings

    def infer(mesh: Any, args: Any, results: Any) -> Any:
        return tuple(NamedSharding(mesh, PartitionSpec(*_entries(x))) for x in args)

    same.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        sharding_rule=_for_shardy(roles, roles, layout, ()),
    )
    return same


def _for_shardy(*fixed: Any) -> Any:
    return functools.partial(_rule, *fixed) if knows_sharding_rules() else None


def _rule(
    roles: tuple[str, ...], results: tuple[str, ...], layout: str, whole: tuple[str, ...],
    mesh: Any, types: Any, out: Any,
) -> Any:  # fmt: skip
    """Shardy's rule: batch and heads are factors of their own, all else (and ``whole``) needs replication.

    With grouped heads, those of q and of k are separate factors: what divides one need not divide the other.
    """
    shapes = [tuple(t.shape) for t in (*types, *out)]
    axes = [axes_of(r, s, layout) for r, s in zip((*roles, *results), shapes, strict=True)]
    heads = [s[a.index(x)] for a, s in zip(axes, shapes, strict=True) for x in "hn" if x in a]
    one_head_factor = len(set(heads)) == 1
    terms, replicated = [], list(whole)
    for i, letters in enumerate(axes):
        factors = []
        for j, letter in enumerate(letters):
            if letter == "-":
                letter = f"u{i}x{j}"
                replicated.append(letter)
            factors.append("h" if letter == "n" and one_head_factor else letter)
        terms.append(" ".join(factors))
    text = ", ".join(terms[: len(roles)]) + " -> " + ", ".join(terms[len(roles) :])
    order = dict.fromkeys(text.replace("->", "").replace(",", " ").split())  # XLA wants them as they appear
    if not knows_replicated_factors():
        return text
    return text, {"need_replication_factors": tuple(f for f in order if f in replicated)}


def _entries(x: Any) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of each axis of an operand."""
    spec = tuple(getattr(x.sharding, "spec", ()) or ())
    spec += (None,) * (len(x.shape) - len(spec))
    return tuple(() if e is None else tuple(e) if isinstance(e, (tuple, list)) else (e,) for e in spec)


class _Choice:
    """Which mesh axes split the batch and the heads, and what that makes of each operand."""

    def __init__(self, mesh: Any, roles: Sequence[str], args: Sequence[Any], layout: str) -> None:
        self.mesh = mesh
        self.axes = [axes_of(r, x.shape, layout) for r, x in zip(roles, args, strict=True)]
        self.sizes = {
            a: n
            for letters, x in zip(self.axes, args, strict=True)
            for a, n in zip(letters, x.shape, strict=True)
        }
        self.batch = self._first(args, "b", ())
        self.heads = self._first(args, "h", self.batch) or self._first(args, "n", self.batch)
        self.group = self.sizes["h"] // self.sizes["n"]
        # Fewer heads of k than shards of q's: k comes whole, each shard takes the head its queries share.
        self.shared = self.sizes["n"] % self.count(self.heads) != 0

    def _first(self, args: Sequence[Any], axis: str, taken: tuple[str, ...]) -> tuple[str, ...]:
        for letters, x in zip(self.axes, args, strict=True):
            entry = dict(zip(letters, _entries(x), strict=True)).get(axis, ())
            if entry and not set(entry) & set(taken) and self._divides(axis, self.count(entry)):
                return entry
        return ()

    def _divides(self, axis: str, count: int) -> bool:
        if axis == "b":
            return self.sizes["b"] % count == 0
        heads, group = self.sizes["h"], self.sizes["h"] // self.sizes["n"]
        return heads % count == 0 and ((heads // count) % group == 0 or group % (heads // count) == 0)

    def count(self, names: tuple[str, ...]) -> int:
        """How many shards the named mesh axes make."""
        return math.prod(self.mesh.shape[name] for name in names)

    def spec(self, letters: str) -> NamedSharding:
        """The sharding of an operand or result with these axes."""
        chosen = {"b": self.batch, "h": self.heads, "n": () if self.shared else self.heads}
        return NamedSharding(self.mesh, PartitionSpec(*(chosen.get(x) or None for x in letters)))


def _infer(
    roles: tuple[str, ...], results: tuple[str, ...], layout: str, mesh: Any, args: Any, shapes: Any
) -> Any:
    choice = _Choice(mesh, roles, args, layout)
    return tuple(choice.spec(axes_of(r, x.shape, layout)) for r, x in zip(results, shapes, strict=True))


def _partition(
    whole: Callable[..., Any], roles: tuple[str, ...], results: tuple[str, ...], layout: str, mesh: Any,
    args: Any, shapes: Any,
) -> Any:  # fmt: skip
    choice = _Choice(mesh, roles, args, layout)
    shard, letters = _on_shard(whole, choice, roles, results, layout, shapes)
    return mesh, shard, tuple(choice.spec(a) for a in letters), tuple(choice.spec(a) for a in choice.axes)


def over_explicit_mesh(
    primitive: Any, params: dict[str, Any], roles: tuple[str, ...], results: tuple[str, ...], layout: str,
    avals: Sequence[Any], outs: Sequence[Any],
) -> Callable[..., Any]:  # fmt: skip
    """The primitive as a function split by hand, for operands whose types say how they are sharded."""
    choice = _Choice(avals[0].sharding.mesh, roles, avals, layout)
    whole = functools.partial(primitive.bind, **params)
    shard, letters = _on_shard(whole, choice, roles, results, layout, outs)
    specs = [choice.spec(a).spec for a in choice.axes]
    split_by_hand = jax.shard_map(
        shard, mesh=choice.mesh, in_specs=tuple(specs), out_specs=tuple(choice.spec(a).spec for a in letters),
        check_vma=False,
    )  # fmt: skip

    def run(*operands: Any) -> Any:
        found = split_by_hand(*map(jax.sharding.reshard, operands, specs))
        return tuple(jax.sharding.reshard(x, a.sharding.spec) for x, a in zip(found, outs, strict=True))

    return run


def _on_shard(
    whole: Callable[..., Any], choice: _Choice, roles: tuple[str, ...], results: tuple[str, ...], layout: str,
    shapes: Sequence[Any],
) -> tuple[Callable[..., Any], list[str]]:  # fmt: skip
    """What each device computes, and the axes of the results."""
    letters = [axes_of(r, x.shape, layout) for r, x in zip(results, shapes, strict=True)]

    def shard(*operands: Any) -> Any:
        local = _local(choice, roles, layout, operands)
        return tuple(
            _sum_over_shards(choice, role, axes, x, tuple(shape.shape))
            for role, axes, x, shape in zip(results, letters, whole(*local), shapes, strict=True)
        )

    return shard, letters


def _local(choice: _Choice, roles: tuple[str, ...], layout: str, operands: Sequence[Any]) -> list[Any]:
    """This shard's operands: dropout's counters begin where it does, shared heads of k and v taken out."""
    local = dict(zip(roles, operands, strict=True))
    heads = choice.sizes["h"] // choice.count(choice.heads)
    if "dropout_seed" in local:
        entries = choice.sizes.get("b", 1) // choice.count(choice.batch)
        local["dropout_seed"] = shift_dropout(
            local["dropout_seed"], batch=_index(choice.batch) * entries, head=_index(choice.heads) * heads
        )
    if choice.shared:
        for name in "kv":
            axis = axes_of(name, local[name].shape, layout).index("n")
            first = _index(choice.heads) * heads // choice.group
            local[name] = jax.lax.dynamic_slice_in_dim(local[name], first, 1, axis)
    return [local[role] for role in roles]


def shift_dropout(words: Any, **first: Any) -> Any:
    """Dropout's seed and offsets (pairs of words, see ``jax._seed``) for a part that begins at ``first``."""
    for i, name in enumerate(("batch", "head", "row", "column")):
        if name in first:
            words = words.at[2 + 2 * i].add(jnp.asarray(first[name]).astype(words.dtype))
    return words


def _index(names: tuple[str, ...]) -> Any:
    return jax.lax.axis_index(names) if names else 0


def _sum_over_shards(choice: _Choice, role: str, axes: str, x: Any, shape: tuple[int, ...]) -> Any:
    """A gradient summed over the shards that each hold a part of it."""
    over: tuple[str, ...] = ()
    if role in ("out", "lse"):
        return x
    if "b" not in axes:
        over += choice.batch
    if "h" not in axes and ("n" not in axes or choice.shared):
        over += choice.heads
    if not over:
        return x
    total = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if "n" in axes and choice.shared:
        at = axes.index("n")
        heads = choice.sizes["h"] // choice.count(choice.heads)
        room = jnp.zeros((*x.shape[:at], choice.sizes["n"], *x.shape[at + 1 :]), total.dtype)
        first = _index(choice.heads) * heads // choice.group
        total = jax.lax.dynamic_update_slice_in_dim(room, total, first, at)
    return jax.lax.psum(total, over).astype(x.dtype)
