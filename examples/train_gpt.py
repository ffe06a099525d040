"""A small GPT in JAX, trained on the Python standard library's own sources through cuattn.

    pip install "cuattn[examples]"
    python examples/train_gpt.py             # a few minutes on two cores
    python examples/train_gpt.py --quick     # under a minute
    XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/train_gpt.py --quick --mesh 2,2,2

It trains twice from the same start on the same batches, once with cuattn's attention and once with plain
softmax attention, everything else equal, under ``jax.jit``. The two loss curves must agree within rounding
and go down. They are drawn into ``gpt-loss.png``; a few lines of sampled text show what was learnt.
Text is taken byte by byte, so there is nothing to download and no tokenizer.

``--mesh`` splits the first training over devices (here the CPU's eight forced ones): batch, heads and the
weights' columns, and the sequence, round a ring. ``--checkpoint`` has it go on where it stopped.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# The one line to change for JAX's own attention: from jax.nn import dot_product_attention
from cuattn.interop.jax import dot_product_attention

Params = dict[str, Any]
Moments = tuple[Params, Params]
Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # (B, S, H, D) each


class Config(NamedTuple):
    """Sizes of the model and of its training."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 256
    batch: int = 8
    steps: int = 300
    rate: float = 2e-3


QUICK = Config(layers=2, width=64, heads=2, context=128, batch=4, steps=40, rate=2e-3)


def flash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention through cuattn, called as JAX's is."""
    return dot_product_attention(q, k, v, is_causal=True)


def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention with the whole score matrix; "highest", as JAX's default on a GPU is TF32."""
    scores = jnp.einsum("bihd,bjhd->bhij", q, k, precision="highest") * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tri(q.shape[1], dtype=bool), scores, -jnp.inf)
    return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores), v, precision="highest")


def corpus(limit: int = 4_000_000) -> np.ndarray:
    """Bytes of the standard library's modules, in the order of their names, at most ``limit``."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text, size = [], 0
    for path in sorted(folder.glob("*.py")):
        text.append(path.read_bytes())
        size += len(text[-1])
        if size >= limit:
            break
    return np.frombuffer(b"\n".join(text)[:limit], np.uint8)


def init(config: Config, key: jax.Array) -> Params:
    """Weights: token and position tables, and per layer the two blocks' matrices; float32."""
    width, keys = config.width, iter(jax.random.split(key, 2 + 4 * config.layers))

    def normal(*shape: int, scale: float = 0.02) -> jax.Array:
        return scale * jax.random.normal(next(keys), shape)

    residual = 0.02 / (2 * config.layers) ** 0.5
    return {
        "tokens": normal(256, width),
        "positions": normal(config.context, width),
        "norm": jnp.ones(width),
        "layers": [
            {
                "norm1": jnp.ones(width),
                "qkv": normal(width, 3 * width),
                "proj": normal(width, width, scale=residual),
                "norm2": jnp.ones(width),
                "up": normal(width, 4 * width),
                "down": normal(4 * width, width, scale=residual),
            }
            for _ in range(config.layers)
        ],
    }


def rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    """Scale every row to a root mean square of 1, then by ``gain``."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * gain


def logits(params: Params, tokens: jax.Array, heads: int, attention: Attention) -> jax.Array:
    """Scores of the next byte, (batch, seqlen, 256), for tokens (batch, seqlen)."""
    batch, seqlen = tokens.shape
    x = params["tokens"][tokens] + params["positions"][:seqlen]
    for layer in params["layers"]:
        qkv = rms_norm(x, layer["norm1"]) @ layer["qkv"]
        q, k, v = jnp.split(qkv.reshape(batch, seqlen, 3 * heads, -1), 3, axis=2)
        x = x + attention(q, k, v).reshape(batch, seqlen, -1) @ layer["proj"]
        x = x + jax.nn.gelu(rms_norm(x, layer["norm2"]) @ layer["up"]) @ layer["down"]
    return rms_norm(x, params["norm"]) @ params["tokens"].T


def loss(params: Params, tokens: jax.Array, heads: int, attention: Attention) -> jax.Array:
    """Mean cross entropy of each next byte, in nats; tokens (batch, context + 1)."""
    scores = jax.nn.log_softmax(logits(params, tokens[:, :-1], heads, attention))
    return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1))


@partial(jax.jit, static_argnames=("config", "attention"), donate_argnums=(0, 1))
def step(
    params: Params, moments: Moments, n: jax.Array, tokens: jax.Array, config: Config, attention: Attention
) -> tuple[Params, Moments, jax.Array]:  # fmt: skip
    """One step of Adam with warm-up and a cosine decay; returns the loss before the step too."""
    value, grads = jax.value_and_grad(loss)(params, tokens, config.heads, attention)
    rate = config.rate * jnp.minimum(1.0, (n + 1) / 20) * (0.55 + 0.45 * jnp.cos(jnp.pi * n / config.steps))
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], grads)
    second = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, moments[1], grads)

    def moved(p: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
        return p - rate * (m / (1 - 0.9 ** (n + 1))) / (jnp.sqrt(s / (1 - 0.99 ** (n + 1))) + 1e-8)

    return jax.tree.map(moved, params, first, second), (first, second), value


def ring_on(mesh: Mesh, remat: bool = False) -> Attention:
    """Causal attention on a mesh of data, tensor and seq: heads over tensor, the sequence round a ring.

    With ``remat`` only its result and LSE are kept for the backward pass.
    """
    from cuattn.interop.jax import ring_attention

    spec = P("data", "seq", "tensor")
    inside = partial(ring_attention, axis_name="seq", causal=True)
    ring = jax.shard_map(lambda q, k, v: inside(q, k, v), mesh=mesh, in_specs=spec, out_specs=spec)
    if not remat:
        return ring
    policy = jax.checkpoint_policies.save_only_these_names("cuattn_out", "cuattn_lse")
    return jax.checkpoint(ring, policy=policy)


def shard(tree: Any, mesh: Mesh) -> Any:
    """Weights, or their moments, split over the mesh's tensor axis as Megatron does."""
    column, row = NamedSharding(mesh, P(None, "tensor")), NamedSharding(mesh, P("tensor"))
    places = {"qkv": column, "up": column, "proj": row, "down": row}

    def put(path: Any, x: jax.Array) -> jax.Array:
        return jax.device_put(x, places.get(str(getattr(path[-1], "key", "")), NamedSharding(mesh, P())))

    return jax.tree_util.tree_map_with_path(put, tree)


def save(path: Path, n: int, state: tuple[Params, Moments]) -> None:
    """Write step n's weights and moments, whole arrays whatever splits them."""
    arrays: dict[str, Any] = {f"x{i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(state))}
    np.savez(path, step=n, **arrays)


def restore(path: Path, state: tuple[Params, Moments]) -> tuple[int, tuple[Params, Moments]]:
    """The step and the state that ``save`` wrote, in the structure of ``state``."""
    leaves, tree = jax.tree.flatten(state)
    with np.load(path) as file:
        return int(file["step"]), jax.tree.unflatten(
            tree, [jnp.asarray(file[f"x{i}"]) for i in range(len(leaves))]
        )


def train(
    config: Config, text: np.ndarray, attention: Attention, *, seed: int = 0, report: bool = True,
    mesh: Mesh | None = None, checkpoint: Path | None = None, stop: int | None = None,
) -> tuple[Params, list[float], float]:  # fmt: skip
    """Train from ``seed``, or from ``checkpoint`` if it is there, up to step ``stop``, and write it then.

    Returns the weights, the loss of every step, and tokens per second.
    """
    params, first = init(config, jax.random.key(seed)), 0
    moments = (jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params))
    if checkpoint is not None and checkpoint.exists():
        first, (params, moments) = restore(checkpoint, (params, moments))
    if mesh is not None:
        params, moments = shard((params, moments), mesh)
    stop = config.steps if stop is None else stop
    losses, began = [], 0.0
    for n in range(first, stop):
        at = np.random.default_rng((seed, n)).integers(0, len(text) - config.context - 1, config.batch)
        tokens = jnp.asarray(np.stack([text[i : i + config.context + 1] for i in at]), jnp.int32)
        if mesh is not None:
            tokens = jax.device_put(tokens, NamedSharding(mesh, P("data")))
        params, moments, value = step(params, moments, jnp.float32(n), tokens, config, attention)
        losses.append(float(value))
        if n == first:
            began = time.perf_counter()  # the first step also compiles
        if report and (n % 50 == 0 or n == stop - 1):
            print(f"  step {n:4}  loss {losses[-1]:.4f}")
    if checkpoint is not None:
        save(checkpoint, stop, (params, moments))
    rate = max(0, stop - first - 1) * config.batch * config.context / (time.perf_counter() - began)
    return params, losses, rate


def sample(params: Params, config: Config, prompt: bytes, length: int = 160) -> str:
    """Continue ``prompt`` by ``length`` bytes drawn from the model at temperature 0.7."""

    @jax.jit
    def draw(window: jax.Array, at: jax.Array, key: jax.Array) -> jax.Array:
        return jax.random.categorical(key, logits(params, window, config.heads, flash)[0, at] / 0.7)

    text, key = list(prompt), jax.random.key(1)
    for i in range(length):
        window = text[-config.context :]
        padded = jnp.asarray([window + [0] * (config.context - len(window))], jnp.int32)
        text.append(int(draw(padded, len(window) - 1, jax.random.fold_in(key, i))))
    return bytes(text).decode(errors="replace")


def draw_curves(path: Path, curves: dict[str, list[float]]) -> None:
    """Draw the loss curves, and below them their difference, into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    fig, (top, bottom) = plt.subplots(
        2, 1, figsize=(7.5, 5.5), sharex=True, height_ratios=[3, 1], layout="constrained"
    )
    (name_a, a), (name_b, b) = curves.items()
    top.plot(b, color="#c8553d", linewidth=4, alpha=0.45, label=name_b)
    top.plot(a, color="#0b6e99", linewidth=1.2, label=name_a)
    top.set(ylabel="loss (nats per byte)", title="A small GPT on the standard library's sources")
    top.legend(frameon=False)
    apart = np.abs(np.subtract(a, b))
    bottom.plot(apart, ".", color="0.3", markersize=4)  # steps without a dot: not a bit apart
    limits = (1e-8, max(1e-4, 10 * apart.max()))
    bottom.set(yscale="log", ylim=limits, xlabel="training step", ylabel="difference")
    for axis in (top, bottom):
        axis.grid(color="0.9", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    fig.savefig(path, dpi=130)
    plt.close(fig)


def main(arguments: list[str] | None = None) -> int:
    """Train with both attentions; 1 if the curves part or the loss does not fall."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer steps")
    parser.add_argument("--steps", type=int, help="training steps")
    parser.add_argument("--mesh", help="devices for data, tensor and sequence, as in 2,2,2")
    parser.add_argument("--remat", action="store_true", help="on a mesh: keep attention's result alone")
    parser.add_argument("--checkpoint", type=Path, help="an .npz file to go on from and to write")
    parser.add_argument("--plot", type=Path, default=Path("gpt-loss.png"), help="where the plot goes")
    options = parser.parse_args(arguments)
    config = QUICK if options.quick else Config()
    if options.steps:
        config = config._replace(steps=options.steps)
    mesh: Mesh | None = None
    attention: Attention = flash
    if options.mesh:
        shape = tuple(int(n) for n in options.mesh.split(","))
        devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
        mesh = Mesh(devices, ("data", "tensor", "seq"))
        attention = ring_on(mesh, options.remat)
    text = corpus()
    print(f"{len(text) / 1e6:.1f} MB of text, {jax.devices()[0].device_kind}")
    print("cuattn" if mesh is None else f"cuattn, {dict(mesh.shape)}")
    trained, a, rate = train(config, text, attention, mesh=mesh, checkpoint=options.checkpoint)
    print(f"  {rate:,.0f} tokens per second\nplain attention")
    if not a:
        parser.error(f"{options.checkpoint} holds all {config.steps} steps")
    _, b, rate = train(config, text, plain)
    print(f"  {rate:,.0f} tokens per second")
    b = b[len(b) - len(a) :]
    apart = float(np.abs(np.subtract(a, b)).max())
    print(f"largest difference between the two curves: {apart:.1e}")
    draw_curves(options.plot, {"cuattn": a, "plain attention": b})
    trained = jax.tree.map(jnp.asarray, jax.device_get(trained))  # off the mesh
    print(f"wrote {options.plot}\n\n{sample(trained, config, b'def ')}")
    fell = np.mean(a[-10:]) < 0.8 * b[0]
    return int(not fell or apart > 0.02)


if __name__ == "__main__":
    sys.exit(main())
