"""Entry point of the command `kvpatch`; the commands are in commands.py, which needs the extra `cli`."""

from __future__ import annotations

import sys

_EXTRA = ("typer", "rich", "click")


def main() -> None:
    """Run the command line `kvpatch`, or print how to install typer and rich if they are missing.

    The script `kvpatch` and `python -m kvpatch` call it.
    """
    try:
        from .commands import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in _EXTRA:
            raise
        print(f"The command line needs {missing}: pip install typer rich", file=sys.stderr)
        sys.exit(2)
    app(prog_name="kvpatch")


if __name__ == "__main__":
    main()
