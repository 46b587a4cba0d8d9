"""Prose in which access codes are hidden, each in a sentence of its own."""

from __future__ import annotations

import random
from dataclasses import dataclass

FACTS = 4
LEAD = "\n\nQuestion: What is the access code of the {place}? Answer with the code only."
ANSWER = "The access code of the {place} is"
SENTENCE = "The access code of the {place} is {code}."
HEAD = "Read the following text. You will be asked about it.\n\n"
PLACES = tuple(
    f"{kind} {thing}"
    for kind in ("northern", "old", "green", "upper", "second", "central")
    for thing in ("warehouse", "library", "observatory", "boathouse", "greenhouse", "archive", "workshop", "museum")
)


@dataclass(frozen=True)
class Hidden:
    """A text with codes in it. facts: (place, code), in the order of the text."""

    text: str
    facts: tuple[tuple[str, str], ...]


def hide_codes(parts: list[str], rng: random.Random, count: int = FACTS) -> Hidden:
    """Put `count` codes between the parts, at drawn places: never before the first part or behind the last."""
    places = rng.sample(PLACES, count)
    codes = ["".join(rng.choices("0123456789", k=4)) for _ in places]
    gaps = sorted(rng.choices(range(1, len(parts)), k=count))
    whole: list[str] = []
    for i, part in enumerate(parts):
        whole += [
            SENTENCE.format(place=place, code=code) for place, code, gap in zip(places, codes, gaps, strict=True) if gap == i
        ]
        whole.append(part)
    return Hidden(" ".join(whole), tuple(zip(places, codes, strict=True)))
