"""The argument block that every kernel takes, CPU and CUDA alike: 64-bit words in one fixed order.

``kernels_cu/params.cuh`` declares the same fields in the same order; ``tests/test_params.py`` compares
the two. A word is a pointer, a signed integer or a double. Strides count elements. An operand that a
call does not have is a null pointer. Nothing here knows how a kernel is launched.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

POINTERS = (
    # forward
    "q", "k", "v", "out", "lse",
    # backward
    "dout", "dlse", "dq", "dk", "dv", "delta", "dq_accum", "dk_accum", "dv_accum",
    # score features
    "bias", "dbias", "mask", "alibi_slopes", "sinks", "dsinks",
    "q_segment_ids", "kv_segment_ids", "q_seqlens", "kv_seqlens", "q_offset",
    "cu_seqlens_q", "cu_seqlens_k", "dropout_seed", "softmax_scale",
    # work lists and counters
    "live_tiles", "semaphore", "scratch",
)  # fmt: skip

INTEGERS = (
    *(f"{name}_stride_{axis}" for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv") for axis in "bhs"),
    *(f"{name}_stride_{axis}" for name in ("bias", "dbias", "mask") for axis in "bhqk"),
    "lse_stride_b", "lse_stride_h",  # also those of dlse and delta; rows are contiguous
    "alibi_slopes_stride_b",
    "batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv", "head_dim", "head_dim_v",
    "window_left", "window_right",  # -1: open
    "q_offset_mode", "q_offset_value",  # see OFFSET_*
    "dropout_seed_value", "dropout_threshold",  # a 16-bit draw below the threshold is kept
    "aux0", "aux1", "aux2", "aux3", "aux4", "aux5", "aux6", "aux7",  # a kernel's own
)  # fmt: skip

FLOATS = ("softmax_scale_value", "softcap", "dropout_scale")

OFFSET_VALUE, OFFSET_ARRAY, OFFSET_BOTTOM_RIGHT = 0, 1, 2

FIELDS = POINTERS + INTEGERS + FLOATS
INDEX: dict[str, int] = {name: i for i, name in enumerate(FIELDS)}
WORDS = len(FIELDS)
_FORMAT = f"<{len(POINTERS) + len(INTEGERS)}q{len(FLOATS)}d"


def pack(values: Mapping[str, int | float]) -> bytes:
    """Pack named values into the block; what is not named is 0. An unknown name is a ``KeyError``."""
    words: list[int | float] = [0] * (WORDS - len(FLOATS)) + [0.0] * len(FLOATS)
    for name, value in values.items():
        words[INDEX[name]] = value
    return struct.pack(_FORMAT, *words)
