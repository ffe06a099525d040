"""The documentation runs: every ``pycon`` block of docs/, the README's examples, and links between pages."""

from __future__ import annotations

import doctest
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """Fenced blocks of a language: the line each starts on, and its text."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    text = page.read_text()
    return [(text.count("\n", 0, m.start(1)), m.group(1)) for m in found]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "pycon")], ids=lambda p: p.name)
def test_examples_print_what_the_page_says(page: Path) -> None:
    names: dict[str, object] = {}
    parser, failures = doctest.DocTestParser(), []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    for line, text in blocks(page, "pycon"):
        test = parser.get_doctest(text, names, page.name, str(page), line)
        runner.run(test, out=failures.append, clear_globs=False)
        names = test.globs
    assert not failures, "".join(failures)


def needs(text: str) -> list[str]:
    """Array libraries that a block imports and that are missing here."""
    missing = [
        name for name in ("cupy", "jax") if f"import {name}" in text and not importlib.util.find_spec(name)
    ]
    if "import cupy" in text and not missing:
        import cupy

        if not cupy.is_available():
            missing.append("a GPU")
    return missing


@pytest.mark.parametrize(("line", "text"), blocks(ROOT / "README.md", "python"), ids=lambda x: str(x)[:20])
def test_readme_examples_run(line: int, text: str) -> None:
    missing = needs(text)
    if missing:
        pytest.skip(f"README.md:{line} needs {', '.join(missing)}")
    exec(compile(text, f"README.md:{line}", "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
