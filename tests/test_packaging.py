"""The package as users get it: a wheel with every file, an editable install, a bare checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LOOK = (
    "import cuattn; from importlib.resources import files; here = files('cuattn')\n"
    "import cuattn.interop.flash_attn\n"
    "kernels = (here / 'kernels_cu' / 'params.cuh').is_file()\n"
    "print(cuattn.__file__, kernels, (here / 'interop').is_dir(), sep='|')"
)


def tracked() -> list[str]:
    """Files under version control, as paths from the root; skips where this is no clone."""
    git = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=False)
    if git.returncode or not git.stdout:
        pytest.skip("not a git clone")
    return [name for name in git.stdout.splitlines() if (ROOT / name).exists() or (ROOT / name).is_symlink()]


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command away from this checkout's import path; its output, or a failure that shows it."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PIP_REQUIRE_VIRTUALENV")}
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, capture_output=True, text=True, check=False, env=clean
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tracked files, links kept as links: what a fresh clone holds."""
    root = tmp_path_factory.mktemp("clone") / "cuattn"
    for name in tracked():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, root / name, follow_symlinks=False)
    return root


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("setuptools")
    out = tmp_path_factory.mktemp("wheel")
    pip(sys.executable, "wheel", "--no-build-isolation", "--no-deps", "-w", out, checkout, cwd=out)
    return next(out.glob("cuattn-*.whl"))


def pip(python: str | Path, *arguments: str | Path, cwd: Path) -> str:
    return run(sys.executable, "-m", "pip", "--quiet", "--python", python, *arguments, cwd=cwd)


def environment(folder: Path) -> Path:
    """A virtual environment that sees this one's libraries (not its cuattn); its interpreter."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    )
    paths = [p for p in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")} if p]
    (site / "outer.pth").write_text("\n".join(paths) + "\n")
    return python


def test_wheel_holds_every_tracked_file(wheel: Path) -> None:
    want = set()
    for name in tracked():
        top, _, rest = name.partition("/")
        if (ROOT / name).is_symlink() or name.endswith((".md", ".txt")):
            continue
        if top == "cuattn":
            want.add(name)
        elif top in ("interop", "kernels_cu"):
            want.add(f"cuattn/{top}/{rest}")
    held = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    assert held == want


def test_wheel_works(wheel: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "env")
    pip(python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    place, kernels, interop = run(python, "-c", LOOK, cwd=tmp_path).strip().split("|")
    assert place.startswith(str(tmp_path))
    assert (kernels, interop) == ("True", "True")


def test_editable_install_works(checkout: Path, tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    python = environment(tmp_path / "env")
    pip(python, "install", "--no-deps", "--no-build-isolation", "--editable", checkout, cwd=tmp_path)
    place, kernels, interop = run(python, "-c", LOOK, cwd=tmp_path).strip().split("|")
    assert Path(place).is_relative_to(checkout)
    assert (kernels, interop) == ("True", "True")


def test_bare_checkout_works(checkout: Path) -> None:
    place, kernels, interop = run(sys.executable, "-c", LOOK, cwd=checkout).strip().split("|")
    assert Path(place).is_relative_to(checkout)
    assert (kernels, interop) == ("True", "True")


def test_versions_agree() -> None:
    import cuattn

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == cuattn.__version__
    assert f"## {cuattn.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_torch_is_asked_for_nowhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [
        *project["dependencies"],
        *(r for extra in project["optional-dependencies"].values() for r in extra),
    ]
    assert not [name for name in asked if name.startswith("torch")]
