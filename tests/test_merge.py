"""merge_attention: attention over disjoint sets of keys is attention over all of them, its gradient too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import Runner

import cuattn

Normal = Callable[..., Any]
PARTS = (slice(0, 5), slice(5, 6), slice(6, 17))


def test_three_parts_with_rows_that_see_none(run: Runner, normal: Normal) -> None:
    """Causal at the top left: early rows see nothing of later parts."""
    arrays = {"q": normal(2, 9, 4, 16), "k": normal(2, 17, 2, 16), "v": normal(2, 17, 2, 8)}
    whole = run(arrays, gradients=False, causal=True, q_offset=-2)
    parts = []
    for part in PARTS:
        cut = {"q": arrays["q"], "k": arrays["k"][:, part], "v": arrays["v"][:, part]}
        parts.append(run(cut, gradients=False, causal=True, q_offset=-2 - part.start))
    outs, lses = ([run.to(p[i]) for p in parts] for i in range(2))
    out, lse = map(run.back, cuattn.merge_attention(outs, lses))
    assert (lse[..., :2] == -np.inf).all() and (out[:, :2] == 0).all()
    np.testing.assert_allclose(out, whole[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, whole[1], rtol=1e-6)
    assert out.dtype == np.float32 and lse.dtype == np.float32


@pytest.mark.parametrize("offset", [8, -2], ids=["every row sees keys", "rows without keys"])
def test_the_gradient_in_jax(normal: Normal, offset: int) -> None:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    q, k, v = (jnp.asarray(normal(1, 9 if n == "q" else 17, 2, 8)) for n in "qkv")
    weight = jnp.asarray(normal(1, 9, 2, 8))

    def loss(out: Any, lse: Any) -> Any:
        return (out * weight).sum() + jnp.where(jnp.isfinite(lse), jnp.sin(lse), 0.0).sum()

    def whole(q: Any, k: Any, v: Any) -> Any:
        return loss(*cuattn.flash_attention(q, k, v, causal=True, q_offset=offset, return_lse=True))

    def merged(q: Any, k: Any, v: Any) -> Any:
        found = [
            cuattn.flash_attention(
                q, k[:, p], v[:, p], causal=True, q_offset=offset - p.start, return_lse=True
            )
            for p in PARTS
        ]
        return loss(*cuattn.merge_attention(*zip(*found, strict=True)))

    wanted, got = (jax.jit(jax.grad(f, argnums=(0, 1, 2)))(q, k, v) for f in (whole, merged))
    for x, y in zip(got, wanted, strict=True):
        assert np.isfinite(x).all()
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_wrong_input_names_the_argument(normal: Normal) -> None:
    out, lse = normal(1, 3, 2, 8), normal(1, 2, 3)
    for name, outs, lses in (
        ("lses", [out], [lse, lse]),
        ("lses", [], []),
        ("outs", [out, out[:, :2]], [lse, lse]),
        ("outs", [out[0]], [lse]),
        ("lses", [out], [lse.transpose(0, 2, 1)]),
        ("lses", [out], [lse.astype(np.float16)]),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: .*takes "):
            cuattn.merge_attention(outs, lses)
