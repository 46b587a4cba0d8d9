"""Single sections of docs/small-models.md put in the place of older ones, and said to be newer than the rest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from . import page

ANEW = "Made anew since this page was made whole, by the tools and intervals that they name themselves: "


def replace(sections: Mapping[str, str], docs: Path) -> None:
    """Put each section where the one of its title is, or before the first task's; and say which are newer than the rest."""
    path = docs / "small-models.md"
    text = path.read_text(encoding="utf-8")
    for title, section in sections.items():
        start = text.find(f"\n## {title}\n")
        if start < 0:
            start = end = text.index(f"\n## {page.SECTIONS[0].title}\n")
        else:
            end = text.index("\n## ", start + 1)
        text = f"{text[:start]}\n{section}{text[end:]}"
    head, first, rest = text.partition("\n## ")
    before, _, said = head.partition(f"\n{ANEW}")
    titles = dict.fromkeys([*(one.strip(".\n") for one in said.split(", ") if one), *map(_link, sections)])
    path.write_text(f"{before}\n{ANEW}{', '.join(titles)}.\n{first}{rest}", encoding="utf-8")


def _link(title: str) -> str:
    return f"[{title}](#{title.lower().replace(' ', '-')})"
