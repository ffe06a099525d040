"""``python -m cuattn`` and the command ``cuattn``: starts the command line, or says what it needs."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; without its libraries, say which extra brings them and exit with 2."""
    try:
        from .cli import app
    except ModuleNotFoundError as missing:
        if missing.name not in ("typer", "rich"):
            raise
        sys.exit(f"The command needs {missing.name}: pip install 'cuattn[cli]'")
    app(prog_name="cuattn")


if __name__ == "__main__":
    main()
