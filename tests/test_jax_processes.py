"""What crosses processes: exported programs, JAX's compilation cache, forks; and torch in the same one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

jax = pytest.importorskip("jax")

SETUP = """
import os, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
import cuattn
folder = Path(sys.argv[1])
rng = np.random.default_rng(0)
q, k, v = (jnp.asarray(rng.standard_normal((2, 40, h, 16)), jnp.float32) for h in (4, 2, 2))
def loss(q, k, v, scale, seed):
    out, lse = cuattn.flash_attention(
        q, k, v, causal=True, softmax_scale=scale, dropout_p=0.2, dropout_seed=seed, return_lse=True
    )
    return (out**2).sum() + jnp.sin(lse).sum()
step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
args = q, k, v, jnp.float32(0.3), jnp.uint32(5)
"""


def run(code: str, folder: Path, **env: str) -> str:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **env}
    done = subprocess.run(
        [sys.executable, "-c", SETUP + code, str(folder)], env=environment, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


EXPORT = """
from jax import export
allowed = [export.DisabledSafetyCheck.custom_call(f"cuattn_{p}") for p in ("cpu", "cuda")]
(folder / "step").write_bytes(export.export(step, disabled_checks=allowed)(*args).serialize())
shape = jax.ShapeDtypeStruct(q.shape, q.dtype), *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args[1:])
forward = export.export(jax.jit(loss), disabled_checks=allowed)(*shape).serialize(vjp_order=1)
(folder / "forward").write_bytes(forward)
value, grads = step(*args)
np.savez(folder / "want.npz", value, *grads)
"""
LOAD = """
from jax import export
from cuattn.interop.jax import register
register()
want = [x for x in np.load(folder / "want.npz").values()]
loaded = export.deserialize((folder / "step").read_bytes())
value, grads = jax.jit(loaded.call)(*args)
for got, x in zip((value, *grads), want):
    np.testing.assert_allclose(got, x, rtol=1e-5, atol=1e-6)
forward = export.deserialize((folder / "forward").read_bytes())
grads = jax.grad(lambda *a: forward.call(*a), argnums=(0, 1, 2))(*args)
for got, x in zip(grads, want[1:]):
    np.testing.assert_allclose(got, x, rtol=1e-5, atol=1e-6)
"""


def test_export_and_load_in_another_process(tmp_path: Path) -> None:
    """A gradient, and a forward whose gradient was exported with it."""
    for name in ("absl", "flatbuffers"):  # what jax.export asks for beside JAX
        pytest.importorskip(name)
    run(EXPORT, tmp_path)
    run(LOAD, tmp_path)


def test_symbolic_sizes_are_refused() -> None:
    """Kernels and tiles are chosen by sizes; one program is exported for each."""
    pytest.importorskip("flatbuffers")
    import cuattn

    (batch,) = jax.export.symbolic_shape("b")
    q = jax.ShapeDtypeStruct((batch, 8, 4, 16), "float32")
    with pytest.raises(ValueError, match=r"q: got shape \(b, 8, 4, 16\); takes sizes that are known"):
        jax.export.export(jax.jit(lambda q: cuattn.flash_attention(q, q, q)))(q)


CACHED = """
hits = []
def listen(name, **_):
    if name.endswith("cache_hits"):
        hits.append(name)

jax.monitoring.register_event_listener(listen)
print(float(step(*args)[0]), len(hits))
"""


def test_the_persistent_compilation_cache(tmp_path: Path) -> None:
    """A second process takes the compiled step from JAX's cache and gets the same value."""
    env = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "XLA_FLAGS": "",
    }
    value, hits = run(CACHED, tmp_path, **env).split()
    assert hits == "0"
    again, hits = run(CACHED, tmp_path, **env).split()
    assert int(hits) > 0
    assert again == value


FORK = """
import faulthandler, warnings
warnings.simplefilter("ignore")
forward = jax.jit(lambda q, k, v: cuattn.flash_attention(q, k, v))
ahead = forward.lower(q, k, v).compile()
later = jax.jit(lambda q, k, v: cuattn.flash_attention(jnp.sin(q @ jnp.ones((16, 16))), k, v))
later = later.lower(q, k, v).compile()
for function, given in ((later, args[:3]), (step, args), (forward, args[:3]), (ahead, args[:3])):
    jax.block_until_ready(function(*given))
calls = {
    "step": lambda: step(*args), "forward": lambda: forward(q, k, v), "ahead": lambda: ahead(q, k, v),
    "later": lambda: later(q, k, v), "eager": lambda: loss(*args),
    "gradient": lambda: jax.grad(lambda q: forward(q, k, v).sum())(q),
    "fresh": lambda: jax.jit(lambda q: cuattn.flash_attention(q, q, q))(q),
}
for name, call in calls.items():
    pid = os.fork()
    if pid == 0:
        faulthandler.dump_traceback_later(20, exit=True)
        try:
            jax.block_until_ready(call())
        except Exception as error:
            os._exit(0 if "forked; start workers with spawn" in str(error) else 3)
        os._exit(4)
    print(name, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
step(*args)  # here all goes on
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_is_told_to_spawn(tmp_path: Path) -> None:
    """XLA's threads are gone in a forked child: an error at the call, compiled before or not, and no hang."""
    codes = dict(line.split() for line in run(FORK, tmp_path).splitlines())
    assert codes == dict.fromkeys(("step", "forward", "ahead", "later", "eager", "gradient", "fresh"), "0")


TORCH = """
import torch
torch.nn.functional.scaled_dot_product_attention(*(torch.rand(1, 2, 64, 16) for _ in range(3)))
before = step(*args)
torch.set_num_threads(2)
t = [torch.from_numpy(np.array(x).swapaxes(1, 2)) for x in args[:3]]
want = torch.nn.functional.scaled_dot_product_attention(*t, is_causal=True, enable_gqa=True).swapaxes(1, 2)
got = jax.jit(lambda q, k, v: cuattn.flash_attention(q, k, v, causal=True))(*args[:3])
np.testing.assert_allclose(got, want.numpy(), rtol=1e-4, atol=1e-5)
theirs = torch.utils.dlpack.from_dlpack(got)
mine = cuattn.flash_attention(*(x.swapaxes(1, 2).contiguous() for x in t), causal=True)
assert isinstance(mine, torch.Tensor)
np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-6)
"""


def test_beside_torch(tmp_path: Path) -> None:
    """Both in one process, threads and all."""
    pytest.importorskip("torch")
    run(TORCH, tmp_path)
