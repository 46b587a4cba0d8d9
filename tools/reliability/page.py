"""docs/reliability.md: a section for each command that measures something, which that command replaces."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reliability.md"
FOLDER = ROOT / "docs/reliability"  # pictures
INTRO = """# Reliability

What is done so that a patched model never computes something other than it should without saying so. Each section is written
by the command that measures it.
"""
# in the order of the page: a section's heading, and the command that writes it
SECTIONS = {
    "Soak": "make soak",
    "Memory": "python -m tools.reliability.memory",
    "Fuzzing the loader": "python -m tools.reliability.fuzz --write",
    "Mutation testing": "make mutation",
    "Versions": "make test-matrix",
    "Misuse": "python -m tools.reliability.misuse --write",
    "transformers' own tests": "make upstream-tests TRANSFORMERS=PATH",
}


def sections(text: str) -> dict[str, str]:
    """Heading -> what stands under it."""
    _, *parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    return {heading: body.strip() for heading, body in zip(parts[::2], parts[1::2], strict=True)}


def put(text: str, path: Path = PAGE) -> None:
    """Write the sections of `text`, Markdown, each in its place on the page; the others stay as they are."""
    given = sections(text)
    if not given or not set(given) <= set(SECTIONS):
        raise ValueError(f"Sections {list(given)} are not those of the page: {list(SECTIONS)}.")
    known = (sections(path.read_text()) if path.is_file() else {}) | given
    there = [name for name in SECTIONS if name in known]
    contents = [f"- [{name}](#{_anchor(name)}): `{SECTIONS[name]}`" for name in there]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([INTRO, *contents, "", *(f"## {name}\n\n{known[name]}\n" for name in there)]))


def _anchor(heading: str) -> str:
    """The name that a heading is linked by."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
