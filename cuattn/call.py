"""One call on NumPy or CuPy arrays: adopt them, bind the spec, get it prepared, run it, give back.

What a signature once led to is kept, so a warm call costs a dictionary look-up and the launch. JAX calls
do not come here (``interop/jax.py``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from . import arrays as arrays_
from . import backends
from .errors import argument_error
from .spec import GRADIENTS, AttentionSpec, Signature, bind, canonical

if TYPE_CHECKING:
    from .interop.adapters import Adapter

INTEGER_VECTORS = (
    "q_segment_ids", "kv_segment_ids", "q_seqlens", "kv_seqlens", "q_offset", "cu_seqlens_q", "cu_seqlens_k"
)  # fmt: skip
FLOAT_VECTORS = ("alibi_slopes", "sinks")
STRIDED = ("q", "k", "v", "bias", "mask")
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_ELSEWHERE = {("cuda", "numpy"): "cupy", ("reference", "cupy"): "numpy"}  # a backend named against the arrays
_MAX_KEPT = 4096

Arrays = dict[str, Any]
Options = dict[str, Any]
Arguments = dict[str, Any]  # of a public function, all of them by name, always in its own order


class Gradients(NamedTuple):
    """Gradients of one call's operands, each in its operand's kind, shape and dtype; None if not given."""

    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None
    dsinks: Any = None


@dataclass(frozen=True, slots=True)
class _Bound:
    """What a signature led to."""

    spec: AttentionSpec
    backend: Any
    forward: Callable[[Mapping[str, Any]], dict[str, Any]] | None  # None: nothing to compute
    pullbacks: dict[Any, Any]


_kept: dict[tuple[Any, ...], _Bound] = {}


def _keep(kept: dict[Any, Any], key: Any, value: Any) -> None:
    if len(kept) >= _MAX_KEPT:
        kept.pop(next(iter(kept)), None)
    kept[key] = value


@dataclass(slots=True)
class Call:
    """Arrays of one call, adopted and canonical, with what their signature led to."""

    home: str  # the caller's array library
    library: str  # numpy or cupy: the caller's arrays, adopted
    adapter: Adapter  # of the library it runs on: another one when the named backend lives elsewhere
    arrays: Arrays
    home_device: int | None  # the caller's
    device: int | None  # where it runs
    bound: _Bound

    def forward(self) -> tuple[Any, Any]:
        """(out, lse) as arrays of the adapter's library."""
        spec = self.bound.spec
        if self.bound.forward is None:
            like = self.arrays["q"]
            lse = self.adapter.full(spec.lse_shape, float("-inf"), spec.accumulator, like)
            return self.adapter.full(spec.out_shape, 0.0, spec.dtype, like), lse
        found = self.bound.forward(self.arrays)
        return found["out"], found["lse"]

    def backward(self, out: Any, lse: Any, dout: Any, dlse: Any, wants: frozenset[str]) -> dict[str, Any]:
        """Gradients by name (dq, ...) as arrays of the adapter's library."""
        spec, adapter, like = self.bound.spec, self.adapter, self.arrays["q"]
        if self.library != adapter.library:
            dout, dlse = (None if x is None else adapter.take(x) for x in (dout, dlse))
        if self.bound.forward is None:
            shapes = ((name, spec.gradient_shape(name), spec.gradient_dtype(name)) for name in wants)
            return {f"d{name}": adapter.full(shape, 0.0, dtype, like) for name, shape, dtype in shapes}
        if dout is None:
            dout = adapter.full(spec.out_shape, 0.0, spec.dtype, like)
        dout = adapter.unit_stride(dout)
        key = (adapter.key(dout), dlse is not None, wants)
        prepared = self.bound.pullbacks.get(key)
        if prepared is None:
            layout = canonical(adapter.signature(dout), spec.layout)
            prepared = self.bound.backend.prepare(
                replace(spec, dout=layout, dlse=dlse is not None), self.device, wants
            )
            _keep(self.bound.pullbacks, key, prepared)
        arrays = {**self.arrays, "out": out, "lse": lse, "dout": dout}
        if dlse is not None:
            arrays["dlse"] = adapter.contiguous(dlse, spec.accumulator)
        return prepared(arrays)

    def incoming(self, dout: Any, dlse: Any) -> tuple[Any, Any]:
        """The incoming gradients, adopted and checked against out and LSE."""
        spec = self.bound.spec
        shapes = (
            ("dout", dout, spec.out_shape, spec.dtype),
            ("dlse", dlse, spec.lse_shape, spec.accumulator),
        )
        adapter, checked = arrays_.adapter(self.library), []
        for name, x, shape, dtype in shapes:
            if x is not None:
                library, x = arrays_.adopt(name, x)
                if library != self.library or adapter.device(x) != self.home_device:
                    raise argument_error(name, f"a {library} array", f"an array like q: {self.library}")
                if x.shape != shape:
                    raise argument_error(name, f"shape {x.shape}", str(shape))
                if x.dtype != adapter.dtypes[dtype]:
                    raise argument_error(name, f"dtype {x.dtype.name}", dtype, kind=TypeError)
            checked.append(x)
        return checked[0], checked[1]

    def give_back(self, x: Any) -> Any:
        """A result in the caller's own kind."""
        if self.library != self.adapter.library:
            x = arrays_.adapter(self.library).take(x)
        return x if self.home == self.library else arrays_.give_back(x, self.home)


# ---- a call that has been made before ----

_OPERANDS = frozenset((*STRIDED, *FLOAT_VECTORS, *INTEGER_VECTORS))
_NOT_COMPARED = frozenset(("dropout_seed", "return_lse"))
_PLAIN = (type(None), bool, int, float, str, tuple)
_columns: dict[int, tuple[Any, Any]] = {}  # getters of operands and options, by how many arguments there are
_describe: dict[type, Callable[[Any], Any]] = {int: int}  # Adapter.key of the array types met so far
_made: dict[tuple[Any, ...], Call] = {}


def _key(arguments: Arguments) -> tuple[Any, ...]:
    """All that decides what a call leads to, values of arrays apart; ``KeyError`` for a new array type."""
    columns = _columns.get(len(arguments))
    if columns is None:
        operands = [name for name in arguments if name in _OPERANDS]
        rest = [name for name in arguments if name not in _OPERANDS | _NOT_COMPARED]
        columns = _columns[len(arguments)] = (operator.itemgetter(*operands), operator.itemgetter(*rest))
    of_operands, of_options = columns
    given = [x if x is None else _describe[type(x)](x) for x in of_operands(arguments)]
    return of_options(arguments), *given


def repeat(arguments: Arguments) -> Call | None:
    """The call of a public function's arguments, if one like it is remembered."""
    try:
        like = _made[_key(arguments)]
    except (KeyError, TypeError):  # TypeError: an option without a hash
        return None
    arrays = {name: arguments[name] for name in like.arrays}
    if "dropout_seed" in arrays:
        if arrays["dropout_seed"] is None:
            return None
        arrays["dropout_seed"] = _seed(arrays["dropout_seed"])
    return Call(like.home, like.library, like.adapter, arrays, like.home_device, like.device, like.bound)


def remember(arguments: Arguments, made: Call) -> None:
    """Keep a call for ``repeat`` if its arrays were taken as they came and their values not looked at."""
    arrays, packed = made.arrays, "cu_seqlens_q" in arguments
    if made.library == "numpy":
        looked_at = packed or "q_seqlens" in arrays or "kv_seqlens" in arrays
    else:
        looked_at = packed and None in (arguments["max_seqlen_q"], arguments["max_seqlen_k"])
    moved = made.home != made.library or made.library != made.adapter.library
    changed = any(arguments[name] is not x for name, x in arrays.items() if name != "dropout_seed")
    options = (x for name, x in arguments.items() if name not in arrays)
    if looked_at or moved or changed or not all(isinstance(x, _PLAIN) for x in options):
        return
    for name, x in arrays.items():
        if name != "dropout_seed":
            _describe[type(x)] = made.adapter.key
    _keep(_made, _key(arguments), replace(made, arrays=dict.fromkeys(arrays)))


# ---- a new call ----


def make(named: Mapping[str, Any], options: Options, backend: str | None) -> Call:
    """Adopt the arrays of a call and look up or make what its signature leads to.

    ``named`` maps argument names to arrays, Python sequences (small integer operands) or None; options are
    those of ``spec.bind``. Raises ``ValueError`` or ``TypeError`` naming the argument.
    """
    home = arrays_.library_of("q", named["q"])
    library, q = arrays_.adopt("q", named["q"])
    adapter = arrays_.adapter(library)
    device = adapter.device(q)
    arrays: Arrays = {}
    for name, x in named.items():
        if x is None:
            continue
        if name == "dropout_seed":
            arrays[name] = _seed(x)
            continue
        if name == "q":
            x = q
        else:
            library_x, x = _adopt(name, x, library, q)
            if library_x != library or adapter.device(x) != device:
                got = f"a {library_x} array" + (
                    "" if library_x != library else f" on device {adapter.device(x)}"
                )
                where = "" if device is None else f" on device {device}"
                raise argument_error(name, got, f"an array like q: {library}{where}")
        arrays[name] = _normal(name, x, adapter)
    options = _check_values(arrays, options, adapter)
    home_device = device
    target = _ELSEWHERE.get((backend or "", library))
    if target is not None:
        backends.select(backend, target)  # says what is missing before the arrays move
        adapter = arrays_.adapter(target)
        arrays = {name: x if name == "dropout_seed" else adapter.take(x) for name, x in arrays.items()}
        device = adapter.device(arrays["q"])
    key = (
        adapter.library,
        backend,
        *((n, adapter.key(x) if n != "dropout_seed" else 0) for n, x in arrays.items()),
    )
    try:
        bound = _kept.get((key, *options.values()))
    except TypeError:  # an unhashable option: bind takes or names it
        options = {name: tuple(x) if isinstance(x, list) else x for name, x in options.items()}
        bound = None
    if bound is None:
        bound = _bind(arrays, options, adapter, backend, device)
        _keep(_kept, (key, *options.values()), bound)
    return Call(home, library, adapter, arrays, home_device, device, bound)


def _check_values(arrays: Arrays, options: Options, adapter: Adapter) -> Options:
    """Check lengths by value where that does not wait for a GPU; look up the longest packed sequences."""
    host = adapter.library == "numpy"
    axis = 2 if options.get("layout") == "bhsd" else 1
    for name, x in (("q_seqlens", "q"), ("kv_seqlens", "k")):
        if host and name in arrays and arrays[x].ndim == 4:
            lengths, most = arrays[name], arrays[x].shape[axis]
            if lengths.size and not 0 <= int(lengths.min()) <= int(lengths.max()) <= most:
                raise argument_error(name, str(lengths.tolist()), f"lengths from 0 to {most}")
    for side, x in (("q", "q"), ("k", "k")):
        name, longest = f"cu_seqlens_{side}", f"max_seqlen_{side}"
        if (
            name not in arrays
            or arrays[name].ndim != 1
            or arrays[x].ndim != 3
            or not (host or options[longest] is None)
        ):
            continue
        ends = arrays_.adapter("numpy").take(arrays[name])
        steps, total = ends[1:] - ends[:-1], arrays[x].shape[0]
        if ends.size and (ends[0] != 0 or ends[-1] > total or (steps < 0).any()):
            raise argument_error(
                name, str(ends.tolist()), f"0, then ends that do not decrease, up to {total}"
            )
        most = int(steps.max(initial=0))
        given = options[longest]
        if given is None:
            options = {**options, longest: most}
        elif hasattr(given, "__index__") and 0 <= given < most:
            raise argument_error(longest, str(given), f"at least the longest sequence, {most}")
    return options


def _adopt(name: str, x: Any, library: str, q: Any) -> tuple[str, Any]:
    if name in INTEGER_VECTORS and isinstance(x, (list, tuple)):
        return library, arrays_.adapter(library).from_sequence(x, "int64", q)
    return arrays_.adopt(name, x)


def _normal(name: str, x: Any, adapter: Adapter) -> Any:
    """An operand as kernels take it: adjacent elements, canonical dtype for the small ones."""
    if name in INTEGER_VECTORS:
        if x.dtype.name not in _INTEGERS:
            raise argument_error(name, f"dtype {x.dtype.name}", "an integer dtype", kind=TypeError)
        return adapter.contiguous(x, "int32")
    if name in FLOAT_VECTORS:
        return adapter.contiguous(x, x.dtype.name)
    return adapter.unit_stride(x) if name not in ("bias", "mask") else x


def _seed(value: Any) -> int:
    """The seed as a signed 64-bit integer."""
    try:
        seed = operator.index(value)
    except TypeError:
        raise argument_error("dropout_seed", repr(value), "an int", kind=TypeError) from None
    if not -(1 << 63) <= seed < 1 << 64:
        raise argument_error("dropout_seed", str(seed), "an int of 64 bits")
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def _bind(
    arrays: Arrays, options: Options, adapter: Adapter, backend_name: str | None, device: int | None
) -> _Bound:
    signatures = {name: adapter.signature(x) for name, x in arrays.items() if name != "dropout_seed"}
    if "dropout_seed" in arrays:
        signatures["dropout_seed"] = Signature("int64", (5,), (1,))
    spec = bind(signatures, **options)
    backend = backends.select(backend_name, adapter.library)
    forward = None if spec.empty else backend.prepare(spec, device, None)
    return _Bound(spec, backend, forward, {})


def wanted(call: Call) -> frozenset[str]:
    """The operands of a call that can want a gradient."""
    return frozenset(name for name in GRADIENTS if name in call.arrays)


def check_wants(wants: Any, given: frozenset[str]) -> frozenset[str]:
    """``wants`` as a set; ``ValueError`` for a name whose operand the call does not have."""
    names = frozenset((wants,) if isinstance(wants, str) else wants)
    if not names <= given:
        raise argument_error("wants", repr(sorted(names)), "names out of " + ", ".join(sorted(given)))
    return names
