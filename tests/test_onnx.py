"""ONNX's own node tests for the operator Attention, through ``flash_attention``.

Inexpressible, by the contract: the output ``qk_matmul_output`` (raw scores and probabilities are not
offered), so Y and the caches of those nodes are checked and that output is not. The expanded variants (the
same operator as a graph of primitive nodes) and FlexAttention (scores changed by a subgraph) are others.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import Runner

onnx = pytest.importorskip("onnx")


@cache
def node_tests() -> dict[str, Any]:
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = load_model_tests(kind="node")
    return {
        t.name: t
        for t in found
        if t.model is not None
        and len(t.model.graph.node) == 1
        and t.model.graph.node[0].op_type == "Attention"
    }


def _heads_first(x: Any, heads: int) -> Any:
    """(batch, seqlen, heads · dim) to (batch, heads, seqlen, dim)."""
    return x.reshape(x.shape[0], x.shape[1], heads, -1).transpose(0, 2, 1, 3)


def _mask(given: dict[str, Any], seqlen_kv: int, arrays: dict[str, Any]) -> None:
    """attn_mask as our mask or bias; keys beyond a shorter one are hidden."""
    mask = given.get("attn_mask")
    if mask is None:
        return
    short = seqlen_kv - mask.shape[-1]
    if short and mask.shape[-1] != 1:
        fill = False if mask.dtype == bool else -np.inf
        mask = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, short)], constant_values=fill)
    if mask.dtype == bool:
        arrays["mask"] = mask
    else:
        arrays["bias"] = mask if mask.dtype == arrays["q"].dtype else mask.astype(np.float32)


def translate(node: Any, inputs: list[Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], bool]:
    """(arrays, options, caches, packed): the node's call in our words."""
    given = {name: x for name, x in zip(node.input, inputs, strict=True) if name}
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    q, k, v = given["Q"], given["K"], given["V"]
    packed = q.ndim == 3
    if packed:
        q = _heads_first(q, attributes["q_num_heads"])
        k, v = (_heads_first(x, attributes["kv_num_heads"]) for x in (k, v))
    past = 0
    if "past_key" in given:
        past = given["past_key"].shape[2]
        k, v = (np.concatenate([given[n], x], axis=2) for n, x in (("past_key", k), ("past_value", v)))
    arrays: dict[str, Any] = {"q": q, "k": k, "v": v}
    left, right = attributes.get("left_window_size", -1), attributes.get("right_window_size", -1)
    causal = bool(attributes.get("is_causal", 0))
    options: dict[str, Any] = {"layout": "bhsd", "causal": causal, "window_size": (left, right)}
    if "nonpad_kv_seqlen" in given:
        arrays["kv_seqlens"] = given["nonpad_kv_seqlen"].astype(np.int32)
        arrays["q_offset"] = (given["nonpad_kv_seqlen"] - q.shape[2]).astype(np.int32)
    else:
        options["q_offset"] = past
    _mask(given, k.shape[2], arrays)
    if attributes.get("scale"):
        options["softmax_scale"] = attributes["scale"]
    options["softcap"] = attributes.get("softcap", 0.0)
    return arrays, options, {"present_key": k, "present_value": v}, packed


def _load(protos: Any) -> list[Any]:
    return [x if isinstance(x, np.ndarray) else onnx.numpy_helper.to_array(x) for x in protos]


@pytest.mark.parametrize("kind", ["reference", "numba", pytest.param("cupy", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", sorted(node_tests()))
def test_node(name: str, kind: str) -> None:
    test = node_tests()[name]
    node = test.model.graph.node[0]
    for inputs, outputs in test.data_sets:
        named = dict(zip([o for o in node.output if o], _load(outputs), strict=True))
        names = [i for i in node.input if i]
        values = dict(zip(names, _load(inputs), strict=True))
        arrays, options, caches, packed = translate(node, [values.get(i) for i in node.input])
        run = Runner(kind)
        out, _, _ = run(arrays, gradients=False, **options)
        if packed:
            out = out.transpose(0, 2, 1, 3).reshape(named["Y"].shape)
        low = out.dtype in (np.float16, ml_dtypes.bfloat16)
        tolerance = (2e-2 if out.dtype != np.float16 else 3e-3) if low else 1e-4
        wanted = named["Y"].astype(np.float64)
        np.testing.assert_allclose(out.astype(np.float64), wanted, rtol=tolerance, atol=tolerance)
        for cache_name, x in caches.items():
            if cache_name in named:
                np.testing.assert_array_equal(x, named[cache_name].reshape(x.shape))
