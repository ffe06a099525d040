"""The documentation runs: every ``pycon`` block of docs/, the README's examples, and links between pages."""

from __future__ import annotations

import ast
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


def raised(kinds: tuple[str, ...]) -> list[ast.Call]:
    """Calls of these names, with literal arguments, in the package's sources."""
    paths = [*ROOT.glob("cuattn/*.py"), *ROOT.glob("cuattn/backends/*.py"), *ROOT.glob("interop/*.py")]
    trees = [ast.parse(path.read_text()) for path in paths]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [c for c in calls if isinstance(c.func, ast.Name) and c.func.id in kinds and c.args]


def literal(node: ast.expr) -> str:
    """The longest literal part of a string expression."""
    texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return max(texts, key=len, default="")


def test_troubleshooting_has_every_message_and_every_argument() -> None:
    page = re.sub(r"\s+", " ", (ROOT / "docs" / "troubleshooting.md").read_text())
    arguments = {literal(call.args[0]) for call in raised(("argument_error",))} - {""}
    assert len(arguments) > 15
    assert not [name for name in sorted(arguments) if f"`{name}`" not in page]
    messages = raised(("BackendUnavailable", "RuntimeError", "NotImplementedError"))
    starts = {re.split(r"[;(]| for | (?=and )", literal(call.args[0]))[0].strip(" :") for call in messages}
    assert len(starts) > 5
    assert not [text for text in sorted(starts) if len(text) > 12 and text not in page]


def test_troubleshooting_has_every_reason_for_no_backend() -> None:
    page = re.sub(r"\s+", " ", (ROOT / "docs" / "troubleshooting.md").read_text())
    for path in ("cuattn/device.py", "cuattn/backends/numba.py", "cuattn/backends/numba_cuda.py"):
        tree = ast.parse((ROOT / path).read_text())
        functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "unavailable")
        for node in (r for f in functions for r in ast.walk(f) if isinstance(r, ast.Return) and r.value):
            text = re.split(r"[;:(]", literal(node.value))[0].strip()
            assert len(text) < 8 or text in page, f"{path}: {text!r}"
