"""How TMA brings a bias, or takes its gradient, in Hopper's kernels. Pure."""

from __future__ import annotations

from ..program import TensorMap
from ..spec import ITEMSIZE, Operand


def fits_tma(bias: Operand | None) -> bool:
    """Whether TMA can bring it: it has rows of its own, which start on 16 bytes."""
    if bias is None or bias.align < 16:
        return False
    size = ITEMSIZE[bias.dtype]
    aligned = all(0 <= stride * size < 1 << 40 and stride * size % 16 == 0 for stride in bias.strides[:3])
    return aligned and bias.strides[2] > 0 and bias.strides[3] == 1


def bias_map(name: str, operand: Operand, rows: int) -> TensorMap:
    """Boxes of 128 bytes by ``rows``; axes along which the bias is broadcast are kept once."""
    batch, heads, length, columns = operand.shape
    size = ITEMSIZE[operand.dtype]
    stride_b, stride_h, stride_q, _ = (size * stride for stride in operand.strides)
    return TensorMap(
        buffer=name,
        dtype=operand.dtype,
        dims=(columns, length, heads if stride_h else 1, batch if stride_b else 1),
        strides=tuple(stride or 16 for stride in (stride_q, stride_h, stride_b)),
        box=(128 // size, rows, 1, 1),
        swizzle=128,
    )
