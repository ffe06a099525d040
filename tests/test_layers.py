"""The package's arrows, read from the syntax trees, and what importing it costs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A module may import from its own ring and from rings before it. A final dot stands for all below a name.
RINGS = (
    ("errors", "params", "philox", "seeds", "prototype", "interop.jaxcompat"),
    ("spec", "program", "device", "tiles", "interop.native"),
    ("jit", "families."),
    (
        "backends",
        "backends.",
        "arrays",
        "interop.adapters",
        "interop.dlpack",
        "interop.libcuda",
        "interop.xla_ffi",
        "interop.xla_handlers",
        "interop.xla_structs",
    ),
    ("call", "merge", "kvcache"),
    ("api",),
    ("planning",),
    ("__init__", "interop", "interop.", "bench", "verify", "info"),
    ("cli",),
    ("__main__",),
)
# What a file may import when it is itself imported; everything else of this list only inside functions.
HEAVY = {
    "cupy",
    "cupyx",
    "cupy_backends",
    "jax",
    "jaxlib",
    "numba",
    "llvmlite",
    "typer",
    "rich",
    "matplotlib",
}
EAGER = {
    "cli": {"typer", "rich"},
    "backends.numba": {"numba"},
    "prototype": {"numba"},
}
EAGER_PATTERNS = (
    (re.compile(r"backends\.(cpu|numba)\w*"), {"numba", "llvmlite"}),
    (re.compile(r"interop\.(jax\w*|xla_\w+)"), {"jax", "jaxlib", "numba", "llvmlite"}),
    (re.compile(r"interop\.(native|libcuda)"), {"numba", "llvmlite"}),
)


def modules() -> dict[str, Path]:
    """Every module of the package by its name below ``cuattn``."""
    found = {}
    for folder, prefix in ((ROOT / "cuattn", ""), (ROOT / "interop", "interop.")):
        for path in sorted(folder.rglob("*.py")):
            inside = path.relative_to(folder)
            if prefix == "" and inside.parts[0] in ("interop", "kernels_cu"):
                continue  # links to the top-level folders
            name = prefix + ".".join(inside.with_suffix("").parts)
            found[name.removesuffix(".__init__") if name != "__init__" else name] = path
    return found


MODULES = modules()


def ring(name: str) -> int:
    """Index of the ring a module belongs to: exact names before prefixes."""
    for exact in (True, False):
        for i, names in enumerate(RINGS):
            if (exact and name in names) or (
                not exact and any(n[-1] == "." and name.startswith(n) for n in names)
            ):
                return i
    raise AssertionError(f"{name} is in no ring: give it one in tests/test_layers.py")


def own_imports(name: str) -> set[str]:
    """Modules of ours that a module imports, anywhere in it."""
    package = (
        name.split(".")
        if MODULES[name].name == "__init__.py" and name != "__init__"
        else name.split(".")[:-1]
    )
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = package[: len(package) - node.level + 1]
        if node.module:
            target = ".".join([*base, node.module])
            below = [f"{target}.{alias.name}" for alias in node.names]
            found.update([b for b in below if b in MODULES] or [target])
        else:
            below = [".".join([*base, alias.name]) for alias in node.names]
            found.update(b if b in MODULES else ".".join(base) or "__init__" for b in below)
    return found


def heavy_imports_at_top(path: Path) -> set[str]:
    """Heavy libraries imported when the module is, type-checking blocks apart."""
    found: set[str] = set()

    def visit(body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.Import):
                found.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                found.add(node.module.split(".")[0])
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for part in ("body", "orelse", "handlers", "finalbody"):
                    visit([n for n in getattr(node, part, []) if isinstance(n, ast.stmt | ast.ExceptHandler)])

    visit(ast.parse(path.read_text()).body)
    return found & HEAVY


@pytest.mark.parametrize("name", MODULES)
def test_arrows(name: str) -> None:
    for target in own_imports(name):
        assert target in MODULES, f"{name} imports {target}, which does not exist"
        assert ring(target) <= ring(name), f"{name} imports {target}, which lies above it"


@pytest.mark.parametrize("name", MODULES)
def test_a_module_says_what_it_is_for_and_imports_relatively(name: str) -> None:
    tree = ast.parse(MODULES[name].read_text())
    assert ast.get_docstring(tree), f"{name} has no docstring"
    for node in ast.walk(tree):
        absolute = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            absolute = [node.module or ""]
        for target in absolute:
            assert target.split(".")[0] not in ("cuattn", "interop", "kernels_cu"), f"{name} imports {target}"


@pytest.mark.parametrize("name", MODULES)
def test_heavy_libraries_are_imported_late(name: str) -> None:
    allowed = set(EAGER.get(name, set()))
    for pattern, names in EAGER_PATTERNS:
        if pattern.fullmatch(name):
            allowed |= names
    assert heavy_imports_at_top(MODULES[name]) <= allowed


def test_only_interop_and_the_command_use_the_api() -> None:
    users = {name for name in MODULES if "api" in own_imports(name)}
    assert all(ring(name) > ring("api") for name in users), users


def test_the_reference_knows_no_kernel() -> None:
    assert own_imports("backends.reference") <= {"spec", "philox", "errors"}


def test_import_is_light() -> None:
    code = (
        "import sys, time; start = time.process_time(); import cuattn; spent = time.process_time() - start\n"
        f"print(spent, *(set({sorted(HEAVY)!r}) & sys.modules.keys()))"
    )
    spent = []
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
        )
        seconds, *loaded = done.stdout.split()
        assert not loaded
        spent.append(float(seconds))
    assert min(spent) < 0.05, spent


def test_cuda_sources_include_only_headers_of_ours() -> None:
    for path in sorted((ROOT / "kernels_cu").iterdir()):
        text = path.read_text()
        for quoted, system in re.findall(r'^\s*#\s*include\s+(?:"([^"]+)"|(<[^>]+>))', text, re.MULTILINE):
            assert not system, f"{path.name} includes {system}: kernels compile without any system header"
            assert quoted.endswith(".cuh"), f"{path.name} includes {quoted}"
            assert (ROOT / "kernels_cu" / quoted).exists(), f"{path.name} includes {quoted}, which is missing"


def test_assembly_lives_in_the_ptx_headers() -> None:
    """All of it with an instruction: an empty statement only says where a value must be ready."""
    for path in sorted((ROOT / "kernels_cu").iterdir()):
        found = re.search(r'\basm\b(?! volatile\("")', path.read_text())
        assert path.name.startswith("ptx") or not found, f"{path.name} holds inline assembly"


def test_links_point_at_the_top_level_folders() -> None:
    for name in ("interop", "kernels_cu"):
        assert (ROOT / "cuattn" / name).resolve() == ROOT / name
