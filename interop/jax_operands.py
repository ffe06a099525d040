"""Operands of a call on JAX arrays made canonical, checked by ``spec.bind``, in the order of the primitives.

Must not bind primitives (``jax.py``, ``jax_parallel.py``) nor know their rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..call import INTEGER_VECTORS
from ..errors import argument_error
from . import jax_primitives as primitives
from . import xla_ffi
from .jaxcompat import vary_alike

_TAKES = "a JAX or NumPy array like q"
_SEED_TAKES = "an int, or an integer scalar"


def canonical(named: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[list[Any], primitives.Call]:
    """Operands in canonical order, dtype and rank, and what to bind the primitives with.

    Raises ``ValueError`` or ``TypeError`` naming the argument.
    """
    if xla_ffi.forked():
        raise RuntimeError(xla_ffi.FORKED)
    arrays = {name: _operand(name, x) for name, x in named.items()}
    static = {name: tuple(x) if isinstance(x, list) else x for name, x in options.items()}
    backend = static.pop("backend", None)
    if backend not in (None, "cuda", "numba", "reference"):
        raise argument_error("backend", repr(backend), "None, 'cuda', 'numba', 'reference'")
    scale: Any = static.get("softmax_scale")
    if isinstance(scale, jax.Array):
        if scale.size != 1 or not jnp.issubdtype(scale.dtype, jnp.floating):
            raise argument_error(
                "softmax_scale", f"{scale.dtype.name}{scale.shape}", "a float or a floating scalar"
            )
        arrays["softmax_scale"] = scale.astype(jnp.float32).reshape(1)
        static["softmax_scale"] = None
    elif scale is not None:
        static["softmax_scale"] = float(scale)
    if "q_offset" in arrays and arrays["q_offset"].ndim == 0:
        arrays["q_offset"] = jnp.broadcast_to(arrays["q_offset"], (jnp.shape(arrays["q"])[0],))
    names = tuple(name for name in primitives.OPERANDS if name in arrays)
    call = primitives.Call(names, tuple(sorted(static.items())), backend)
    call.spec([arrays[name] for name in names])
    for name in ("bias", "mask"):
        if name in arrays:
            x = arrays[name]
            arrays[name] = x.reshape((1,) * (4 - x.ndim) + x.shape)
    return vary_alike([arrays[name] for name in names]), call


def array(name: str, x: Any) -> Any:
    if isinstance(x, jax.Array):
        if not all(isinstance(n, int) for n in x.shape):  # jax.export's symbolic dimensions
            raise argument_error(name, f"shape {x.shape}", "sizes that are known when it is traced")
        return x
    if isinstance(x, (np.ndarray, np.generic)):
        return jnp.asarray(x)
    raise argument_error(name, type(x).__name__, _TAKES, kind=TypeError)


def _operand(name: str, x: Any) -> Any:
    if name == "dropout_seed":
        return _seed(x)
    if name in INTEGER_VECTORS:
        x = jnp.asarray(x) if isinstance(x, (list, tuple)) else array(name, x)
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise argument_error(name, f"dtype {x.dtype.name}", "an integer dtype", kind=TypeError)
        return x.astype(jnp.int32)
    return array(name, x)


def _seed(x: Any) -> Any:
    """(seed, batch, head, row, column) of dropout, each as two words, low first: JAX may lack int64.

    All but the seed are 0: the call is whole. A shard sets them (``jax_sharding.py``, ``jax_parallel.py``).
    """
    if hasattr(x, "__index__") and not isinstance(x, jax.Array):
        seed = int(x)
        if not -(1 << 63) <= seed < 1 << 64:
            raise argument_error("dropout_seed", str(seed), "an int of 64 bits")
        return jnp.asarray(np.array([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, *[0] * 8], np.uint32))
    x = array("dropout_seed", x)
    if x.size != 1 or not jnp.issubdtype(x.dtype, jnp.integer):
        raise argument_error("dropout_seed", f"{x.dtype.name}{x.shape}", _SEED_TAKES, kind=TypeError)
    x = x.reshape(())
    if x.dtype.itemsize == 8:
        words = [x & 0xFFFFFFFF, x >> 32 & 0xFFFFFFFF]
    else:
        words = [x, x >> 31 if jnp.issubdtype(x.dtype, jnp.signedinteger) else jnp.zeros_like(x)]
    return jnp.pad(jnp.stack([w.astype(jnp.uint32) for w in words]), (0, 8))
