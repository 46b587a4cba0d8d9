"""Draws docs/kept.png, the picture of the README: `python -m tools.kept_picture`, on the model of `make real`."""

from __future__ import annotations

from pathlib import Path

from kvpatch.cli import story
from kvpatch.cli.loading import Source
from tools import real_model

PICTURE = Path(__file__).parents[1] / "docs" / "kept.png"
POLICIES = ("h2o", "kvzip")
DPI = 100


def draw(path: Path) -> None:
    """Draw what is left of the demo's text under two policies, on the model of tools.real_model."""
    source = Source(real_model.find_model(), dtype="float32")
    model, tokenizer = source.model(), source.tokenizer()
    reading = story.read_story(model, tokenizer)
    told = [story.ask(model, tokenizer, reading, policy) for policy in POLICIES]
    story.draw(reading, told).savefig(path, dpi=DPI)


if __name__ == "__main__":
    draw(PICTURE)
