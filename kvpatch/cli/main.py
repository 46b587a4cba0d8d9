"""The command `kvpatch`: the door. The commands themselves are in commands.py, which needs the extra `tools`."""

from __future__ import annotations

import sys

_EXTRA = ("typer", "rich", "click")


def main() -> None:
    """Run the command line; where typer or rich are missing, say how to get them."""
    try:
        from .commands import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in _EXTRA:
            raise
        print(f"The command line needs {missing}: pip install kvpatch[tools]", file=sys.stderr)
        sys.exit(2)
    app()


if __name__ == "__main__":
    main()
