"""The facts behind ``cuattn info``: what this machine offers, and what to install for what it lacks.

Every probe keeps its reason; nothing here prints, raises or installs.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
from importlib import import_module, metadata
from typing import Any

from .backends import backends

PACKAGES = (
    "numpy", "numba", "llvmlite", "ml_dtypes", "cupy-cuda12x", "cupy-cuda13x", "cupy", "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvrtc-cu12", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "typer", "rich",
    "matplotlib",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Installed versions of what cuattn uses."""
    found = {"python": platform.python_version(), "cuattn": version("cuattn") or "a checkout, not installed"}
    found |= {name: v for name in PACKAGES if (v := version(name)) is not None}
    return found


def version(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def driver_cuda() -> str | None:
    """The newest CUDA that the NVIDIA driver takes ("13.0"), asked of nvidia-smi; None without a driver."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None
    try:
        text = subprocess.run([smi], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    _, found, rest = text.partition("CUDA Version:")
    return rest.split()[0] if found else None


def gpus() -> tuple[list[dict[str, Any]], str]:
    """Each GPU's facts, and why there is none (or why it cannot be used) with what to install."""
    driver = driver_cuda()
    if importlib.util.find_spec("cupy") is None:
        if driver is None:
            return [], "no NVIDIA driver found (nvidia-smi is missing or finds no GPU)"
        extra = "cuda13" if int(driver.split(".")[0]) >= 13 else "cuda12"
        return [], f"a driver for CUDA {driver} but no CuPy: pip install 'cuattn[{extra}]'"
    try:
        import cupy

        if not cupy.is_available():
            return [], "CuPy is installed, but it finds no NVIDIA driver or no GPU"
        return [_gpu(cupy, index) for index in range(cupy.cuda.runtime.getDeviceCount())], ""
    except Exception as fault:  # a broken CuPy must not end the report about it
        return [], f"CuPy does not work: {type(fault).__name__}: {str(fault).splitlines()[0]}"


def _gpu(cupy: Any, index: int) -> dict[str, Any]:
    facts = cupy.cuda.runtime.getDeviceProperties(index)
    arch = 10 * facts["major"] + facts["minor"]
    return {
        "index": index,
        "name": facts["name"].decode(),
        "arch": f"sm_{arch}",
        "SMs": facts["multiProcessorCount"],
        "memory_GiB": round(facts["totalGlobalMem"] / 2**30, 1),
        "shared_memory_per_block_KiB": facts["sharedMemPerBlockOptin"] / 1024,
        "L2_MiB": facts["l2CacheSize"] / 2**20,
        "note": "" if arch >= 75 else "older than sm_75: no kernels for it",
    }


def compiler() -> dict[str, str]:
    """NVRTC's version and where CUDA's headers are, or why not. Our kernels include no system headers."""
    found: dict[str, str] = {}
    if importlib.util.find_spec("cupy") is None:
        return {"NVRTC": "reached through CuPy, which is not installed"}
    try:
        from cupy.cuda import nvrtc, runtime

        found["NVRTC"] = "{}.{}".format(*nvrtc.getVersion())
        number = runtime.driverGetVersion()
        found["driver"] = f"CUDA {number // 1000}.{number % 1000 // 10}" if number else "none"
    except Exception as fault:
        found.setdefault("NVRTC", f"not usable: {str(fault).splitlines()[0]} (pip install 'cuattn[cuda13]')")
        found.setdefault("driver", "none")
    found["CUDA headers"] = _headers()
    return found


def _headers() -> str:
    """The folder of CUDA's headers, which CuPy's own kernels (not ours) want."""
    candidates = [os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or [] if spec else []:
        candidates += [os.path.join(root, "cu13"), os.path.join(root, "cuda_runtime")]
    for root in candidates:
        folder = os.path.join(root, "include")
        if root and os.path.exists(os.path.join(folder, "cuda_fp16.h")):
            return folder
    return "not found: our kernels need none, CuPy's own do (the extras cuda12 and cuda13 bring them)"


def choices() -> list[tuple[str, str, str]]:
    """For each kind of array: the backend that a call gets, and why (or why it would fail)."""
    states = backends()
    rows = []

    def row(kind: str, backend: str, why: str) -> None:
        state = states[backend]
        rows.append((kind, backend if state.available else "none", why if state.available else state.reason))

    row("NumPy", "numba", "host memory: compiled tiles on all cores")
    row("CuPy", "cuda", "device memory: CUDA kernels on the array's GPU and current stream")
    if importlib.util.find_spec("jax") is None:
        rows.append(
            ("JAX", "none", "JAX is not installed: pip install 'cuattn[jax]' (GPU: jax-cuda12, jax-cuda13)")
        )
        return rows
    try:
        import jax

        platform_name = jax.default_backend()
    except Exception as fault:
        rows.append(("JAX", "none", f"JAX does not start: {str(fault).splitlines()[0]}"))
        return rows
    if platform_name in ("gpu", "cuda"):
        row("JAX", "cuda", "its default device is a GPU; arrays on the CPU get numba")
    else:
        row("JAX", "numba", f"its default device is the {platform_name}; inside XLA, without a callback")
    return rows


def cache() -> str:
    """The folder in which compiled CUDA kernels are kept."""
    from .jit import cache_folder

    return str(cache_folder())


def facts() -> dict[str, Any]:
    """Everything that ``cuattn info`` shows, as plain data."""
    devices, why = gpus()
    compilers = compiler()
    if devices:
        reason = import_module(".backends.numba_cuda", __package__).unavailable()
        compilers["numba.cuda"] = reason or 'works, for backend="numba" on CuPy arrays'
    return {
        "backends": {n: {"available": s.available, "reason": s.reason} for n, s in backends().items()},
        "choices": [dict(zip(("arrays", "backend", "why"), row, strict=True)) for row in choices()],
        "gpus": devices,
        "no_gpu": why,
        "compiler": compilers,
        "versions": versions(),
        "kernel_cache": cache(),
    }
