"""A call like one before takes a short way: the same results, the same errors, nothing kept from before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cuattn
from cuattn import call

Normal = Callable[..., Any]


@pytest.fixture
def given(normal: Normal) -> dict[str, Any]:
    return {"q": normal(2, 6, 4, 8), "k": normal(2, 7, 2, 8), "v": normal(2, 7, 2, 8)}


def remembered(**arguments: Any) -> bool:
    """Whether ``flash_attention`` takes the short way the second time."""
    before = len(call._made)
    first = cuattn.flash_attention(**arguments, backend="reference")
    again = cuattn.flash_attention(**arguments, backend="reference")
    np.testing.assert_array_equal(first, again)
    return len(call._made) > before


def test_plain_arrays_are_remembered(given: dict[str, Any]) -> None:
    assert remembered(**given, softcap=3.25)
    assert remembered(**given, softcap=3.25, bias=np.zeros((6, 7), np.float32))
    assert remembered(**given, softcap=3.25, q_offset=np.array([1, 2], np.int32), causal=True)
    assert not remembered(**given, softcap=3.25)  # the same call: nothing new


def test_what_is_looked_at_or_converted_is_not(given: dict[str, Any]) -> None:
    assert not remembered(**given, softcap=4.5, kv_seqlens=np.array([3, 7], np.int32))
    assert not remembered(**given, softcap=4.5, kv_seqlens=(3, 7))
    assert not remembered(**given, softcap=4.5, q_offset=np.array([1, 2]), causal=True)  # int64
    assert not remembered(**given, softcap=4.5, window_size=[3, 1])
    assert not remembered(**given, softcap=np.float32(4.5))


def test_a_remembered_call_sees_new_values(given: dict[str, Any]) -> None:
    options = {"backend": "reference", "dropout_p": 0.5, "softcap": 5.75}
    for seed in (1, 2):
        q = given["q"] + seed
        out = cuattn.flash_attention(q, given["k"], given["v"], dropout_seed=seed, **options)
        call._made.clear()
        call._kept.clear()
        np.testing.assert_array_equal(
            out, cuattn.flash_attention(q, given["k"], given["v"], dropout_seed=seed, **options)
        )
    with pytest.raises(ValueError, match=r"^dropout_seed: "):
        cuattn.flash_attention(**given, **options)


def test_lengths_are_checked_every_time(given: dict[str, Any]) -> None:
    lengths = np.array([3, 7], np.int32)
    cuattn.flash_attention(**given, kv_seqlens=lengths, backend="reference")
    lengths[0] = 8
    with pytest.raises(ValueError, match=r"^kv_seqlens: "):
        cuattn.flash_attention(**given, kv_seqlens=lengths, backend="reference")


@pytest.mark.parametrize("change", ["shape", "strides", "dtype"])
def test_other_arrays_are_other_calls(given: dict[str, Any], change: str) -> None:
    cuattn.flash_attention(**given, backend="reference")
    q = given["q"]
    q = {"shape": q[:, :5], "strides": q[:, ::-1], "dtype": q.astype(np.float64)}[change]
    if change == "dtype":
        with pytest.raises(TypeError, match=r"^k: "):
            cuattn.flash_attention(q, given["k"], given["v"], backend="reference")
        return
    out = cuattn.flash_attention(q, given["k"], given["v"], backend="reference")
    whole = cuattn.flash_attention(q.copy(), given["k"], given["v"], backend="reference")
    np.testing.assert_array_equal(out, whole)


@pytest.mark.parametrize("backend", ["reference", "numba"])
def test_the_other_byte_order(given: dict[str, Any], backend: str) -> None:
    wanted = cuattn.flash_attention(**given, backend=backend)
    swapped = {name: x.astype(x.dtype.newbyteorder()) for name, x in given.items()}
    np.testing.assert_array_equal(cuattn.flash_attention(**swapped, backend=backend), wanted)


def test_gradients_of_a_remembered_call(given: dict[str, Any]) -> None:
    found = []
    for _ in range(2):
        out, pullback = cuattn.flash_attention_vjp(**given, causal=True, softcap=6.5, backend="reference")
        found.append(pullback(out))
    for a, b in zip(found[0][:3], found[1][:3], strict=True):
        np.testing.assert_array_equal(a, b)
