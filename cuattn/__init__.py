"""Exact attention for NumPy, CuPy and JAX arrays: FlashAttention kernels without a compiler at install."""

from typing import TYPE_CHECKING, Any

from .api import (
    flash_attention as flash_attention,
)
from .api import (
    flash_attention_varlen as flash_attention_varlen,
)
from .api import (
    flash_attention_varlen_vjp as flash_attention_varlen_vjp,
)
from .api import (
    flash_attention_vjp as flash_attention_vjp,
)
from .backends import backends as backends
from .call import Gradients as Gradients
from .errors import BackendUnavailable as BackendUnavailable
from .merge import merge_attention as merge_attention
from .seeds import set_seed as set_seed

if TYPE_CHECKING:
    from .planning import plan as plan
    from .planning import precompile as precompile

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """``plan`` and ``precompile``, loaded when first asked for: most programs never do."""
    if name in ("plan", "precompile"):
        from . import planning

        return getattr(planning, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
