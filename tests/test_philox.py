"""Dropout's generator: the published vectors of Philox, our mapping's own, and the keep rate."""

from __future__ import annotations

import numpy as np
import pytest

from cuattn import philox


def test_philox4x32_7_vectors() -> None:
    """Random123's kat_vectors for philox4x32 with 7 rounds."""
    cases = [
        ([0, 0, 0, 0], (0, 0), [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
        ([0xFFFFFFFF] * 4, (0xFFFFFFFF,) * 2, [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A],
        ),
    ]
    for counter, key, wanted in cases:
        np.testing.assert_array_equal(philox.philox4x32(np.array(counter, np.uint32), key), wanted)


def test_a_mask_is_part_of_a_larger_one() -> None:
    whole = philox.keep_mask(7, 0.4, 3, 4, 50, 100)
    part = philox.keep_mask(7, 0.4, 1, 2, 30, 36, first=(2, 1, 20, 64))
    np.testing.assert_array_equal(part[0], whole[2, 1:3, 20:, 64:])


def test_the_mapping_of_a_draw() -> None:
    """Column 32 g + 8 t + 2 j + h reads half h of word t of the call (4 g + j, row, head, batch)."""
    seed, (b, h, row, column) = 0x123456789ABCDEF, (1, 2, 5, 77)
    group, t, j, half = column // 32, column // 8 % 4, column // 2 % 4, column % 2
    counter = np.array([4 * group + j, row, h, b], np.uint32)
    word = int(philox.philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))[t])
    draw = word >> (16 * half) & 0xFFFF
    for p in (draw / 65536 - 0.01, draw / 65536 + 0.01):
        kept = philox.keep_mask(seed, 1 - p, 2, 3, 6, 80)[b, h, row, column]
        assert kept == (draw < philox.threshold(1 - p))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_keep_rate(p: float) -> None:
    kept = philox.keep_mask(11, p, 2, 4, 256, 256)
    n = kept.size
    assert abs(kept.mean() - (1 - p)) < 3 * np.sqrt(p * (1 - p) / n) + 2**-16


def test_seeds_heads_rows_and_columns_differ() -> None:
    a, b = philox.keep_mask(1, 0.5, 1, 2, 64, 64), philox.keep_mask(2, 0.5, 1, 2, 64, 64)
    for x, y in ((a, b), (a[0, 0], a[0, 1]), (a[..., 0, :], a[..., 1, :]), (a[..., 0], a[..., 1])):
        assert 0.3 < (x == y).mean() < 0.7
