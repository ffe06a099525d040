"""``cuattn.plan``: what it counts, against counting by hand."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
from cuattn import planning
from cuattn.planning import shaped


def visible_by_hand(seqlen_q: int, seqlen_kv: int, left: int, right: int, offset: int) -> int:
    i, j = np.arange(seqlen_q)[:, None] + offset, np.arange(seqlen_kv)
    seen = np.ones((seqlen_q, seqlen_kv), bool)
    if right >= 0:
        seen &= j - i <= right
    if left >= 0:
        seen &= i - j <= left
    return int(seen.sum())


@pytest.mark.parametrize("lengths", [(7, 7), (5, 12), (12, 5), (1, 9)])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (0, 0), (2, 4)])
@pytest.mark.parametrize("offset", [None, 0, 3, -2])
def test_visible_scores(lengths: tuple[int, int], window: tuple[int, int], offset: int | None) -> None:
    q, k = shaped((1, lengths[0], 1, 8), "float32"), shaped((1, lengths[1], 1, 8), "float32")
    spec = planning.bind_call(q, k, k, {"window_size": window, "q_offset": offset})
    shift = lengths[1] - lengths[0] if offset is None else offset
    assert planning.visible_scores(spec) == visible_by_hand(*lengths, *window, shift)


def test_a_plan_of_real_arrays_on_the_cpu() -> None:
    x = np.zeros((2, 100, 4, 32), np.float32)
    made = cuattn.plan(x, x, x)
    assert made.backend == "numba"
    assert made.device is None
    assert made.flops == 4 * 2 * 4 * 100 * 100 * 32
    assert made.memory_bytes == 4 * x.nbytes + 2 * 4 * 100 * 4  # q, k, v, out and LSE
    assert made.seconds is None


def test_a_broadcast_bias_counts_once() -> None:
    x = shaped((2, 64, 4, 32), "float32")
    bare = planning.plan(x, x, x)
    made = planning.plan(x, x, x, bias=np.zeros((4, 1, 64), np.float32))
    assert made.memory_bytes - bare.memory_bytes == 4 * 64 * 4


def test_backward_counts_five_products() -> None:
    x = shaped((1, 128, 2, 64), "float16")
    forward = planning.plan(x, x, x, device="A100", compile_kernels=False)
    backward = planning.plan(x, x, x, device="A100", compile_kernels=False, backward=True)
    assert backward.flops == 2.5 * forward.flops
    assert backward.standard_flops == 2 * forward.standard_flops


def test_the_roofline_has_two_sides() -> None:
    long, short = shaped((1, 8192, 16, 128), "bfloat16"), shaped((1, 1, 16, 128), "bfloat16")
    busy = planning.plan(long, long, long, device="H200", compile_kernels=False)
    assert busy.balance is not None
    assert busy.intensity > busy.balance
    assert busy.seconds == busy.flops / 989e12
    decode = planning.plan(short, long, long, device="H200", compile_kernels=False)
    assert decode.seconds == decode.memory_bytes / 4800e9


def test_a_plan_says_how_keys_are_cut() -> None:
    query, keys = shaped((1, 1, 32, 128), "bfloat16"), shaped((1, 32768, 8, 128), "bfloat16")
    cut = planning.plan(query, keys, keys, device="H200", compile_kernels=False)
    assert [use.name for use in cut.kernels] == ["fwd_sm90", "fwd_merge"]
    assert (cut.kernels[0].parts, cut.kernels[0].heads) == (16, 4)
    whole = planning.plan(keys, keys, keys, device="H200", compile_kernels=False)
    assert [(use.name, use.parts) for use in whole.kernels] == [("fwd_sm90", None)]


def test_residency_is_the_scarcest_resource() -> None:
    a100 = planning.find_device("a100")
    assert planning._residency(a100, 128, 0, 64) == (8, "registers")
    assert planning._residency(a100, 128, 80 * 1024, 32) == (2, "shared memory")
    assert planning._residency(a100, 1024, 0, 16) == (2, "threads")


def test_wrong_arguments_are_named() -> None:
    x = shaped((1, 64, 2, 32), "float16")
    with pytest.raises(ValueError, match="device"):
        planning.plan(x, x, x, device="Voodoo2")
    with pytest.raises(ValueError, match="backend"):
        planning.plan(x, x, x, backend="reference")
    with pytest.raises(TypeError, match="q"):
        planning.plan(3, x, x)
    with pytest.raises(ValueError, match="heads"):
        planning.plan(x, shaped((1, 64, 3, 32), "float16"), shaped((1, 64, 3, 32), "float16"), device="A100")
