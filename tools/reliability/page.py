"""docs/reliability.md: a section for each command that measures something, which that command replaces."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reliability.md"
FOLDER = ROOT / "docs/reliability"  # pictures
INTRO = """# Reliability

What is done so that a patched model never computes something else than it should without saying so. Each section is written
by the command that it names; the tests named below run in `make test`.
"""
# in the order of the page: a section's heading, and the file that measures it
SECTIONS = {
    "Soak": "tools/soak.py",
    "Memory": "tools/reliability/memory.py",
    "Misuse": "tools/reliability/misuse.py",
    "Fuzzing the loader": "tools/reliability/fuzz.py",
    "Mutation testing": "tools/reliability/mutation.py",
    "Versions": "tools/test_matrix.py",
}


def sections(text: str) -> dict[str, str]:
    """Heading -> what stands under it."""
    _, *parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    return {heading: body.strip() for heading, body in zip(parts[::2], parts[1::2], strict=True)}


def put(heading: str, body: str, path: Path = PAGE) -> None:
    """Write a section in Markdown, in its place on the page; the others stay as they are."""
    known = sections(path.read_text()) if path.is_file() else {}
    known[heading] = body.strip()
    parts = [f"## {name}\n\n{known[name]}\n" for name in SECTIONS if name in known]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([INTRO, *parts]))
