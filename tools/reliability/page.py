"""docs/reliability.md: a section for each command that measures something, which that command replaces."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reliability.md"
FOLDER = ROOT / "docs/reliability"  # pictures
INTRO = """# Reliability

What is done so that a patched model never computes something other than it should without saying so. What becomes of
interrupts, full memory, broken files and threads is in [what works](guides/works-with.md#when-something-goes-wrong).
Each section names code and errors as they were when it was measured; some have other names now.
"""
SECTIONS = {
    "Soak": (
        "make soak",
        r"sequences \| (\d+).*?calls \| (\d+).*?failures \| (\d+)",
        "**{} random sequences, {} calls**, with exceptions thrown in between, each beside a reference implementation: "
        "{} failures.",
    ),
    "Memory": (
        "python -m tools.reliability.memory",
        r"\| h2o \| ([\d,]+) steps \|[^\n]*\| \+0\.00 \|[^\n]*\| \+0\.00 \|",
        "**Over {} decode steps** under a budget neither the number of tensors nor their bytes grow.",
    ),
    "Fuzzing the loader": (
        "python -m tools.reliability.fuzz --write",
        r"([\d,]+) files.*?(\d+) crashes",
        "**{} broken cache files:** {} crashes; what loads goes on within its budget.",
    ),
    "Mutation testing": (
        "make mutation",
        r"Of the (\d+) .*?, ([\d.]+%) were",
        "**{} small changes of policies, cache and attention:** the tests notice {}.",
    ),
    "Versions": (
        "make test-matrix",
        r"\A(?!.*\| fail).*?\| (5[\d.]+) \| .*\n\| (5[\d.]+) \|",
        "**transformers {} to {}**, and several versions of torch: the tests pass.",
    ),
    "transformers' own tests": (
        "make upstream-tests TRANSFORMERS=PATH",
        r"transformers ([\d.]+)",
        "**The tests of transformers {}** of five architectures give the same results patched, but for one that asks for the "
        "name of the cache's class; of five more those of generation ran, and each that differs is listed.",
    ),
}
"""In the order of the page, of each section: the command that writes it, and what a reader came for: a pattern for the figures
in it, and the sentence that they fill in."""


def in_short(known: dict[str, str]) -> list[str]:
    """One line for each section that is there, with its figures and the command that writes it."""
    lines = []
    for name, (command, pattern, words) in SECTIONS.items():
        found = re.search(pattern, known.get(name, ""), re.DOTALL)
        if name in known:
            said = f" {words.format(*found.groups())}" if found else ""
            lines.append(f"- [{name}](#{_anchor(name)}):{said} (`{command}`)")
    return lines


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
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([INTRO, *in_short(known), "", *(f"## {name}\n\n{known[name]}\n" for name in there)]))


def _anchor(heading: str) -> str:
    """The name that a heading is linked by."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
