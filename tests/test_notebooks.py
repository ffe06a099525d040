"""Every notebook runs from top to bottom, without a GPU and without a screen."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
# The kernel's messages go over sockets whose event loops the client closes after the fact.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::DeprecationWarning")
def test_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUATTN_STATIC", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    book = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(book, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
    assert any(
        "image/png" in output.get("data", {}) for cell in book.cells for output in cell.get("outputs", [])
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_opens_with_its_aim_and_closes_with_what_to_try(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    assert "At the end you will know" in book.cells[0].source
    assert "## What to try" in book.cells[-1].source


def test_every_notebook_was_found() -> None:
    assert [path.name[:2] for path in NOTEBOOKS] == [f"{i + 1:02}" for i in range(len(NOTEBOOKS))]
