"""A list of keys with a number each: one is asked at the prompt's end, or several after compression."""

from __future__ import annotations

import random
from typing import Any

from ..chat import Frame
from ..samples import Probe, Sample, ask
from .hidden import PLACES

ENTRIES, ASKED = 40, 4
HEAD = "Read this list of access codes.\n\n"
LINE = "- {place}: {code}"
LEAD = "\n\nWhat is the access code of the {place}? Answer with the code only."
ANSWER = "- {place}:"


def make_samples(tokenizer: Any, count: int, later: bool = False) -> list[Sample]:
    """Make samples whose prompt ends with the question; later: several come after the list was read and compressed."""
    frame, samples = Frame(tokenizer), []
    for i in range(count):
        rng = random.Random(f"lists {i}")
        codes = {place: "".join(rng.choices("0123456789", k=4)) for place in rng.sample(PLACES, ENTRIES)}
        text = HEAD + "\n".join(LINE.format(place=place, code=code) for place, code in codes.items())
        asked = rng.sample(sorted(codes), ASKED if later else 1)
        read = frame.before + frame.encode(text)
        found = []
        for place in asked:
            question = frame.encode(LEAD.format(place=place)) + frame.after
            lead = frame.encode(ANSWER.format(place=place) + " ")
            found.append((question, Probe("code", lead, frame.encode(codes[place]))))
        samples.append(ask("lists", i, later, read, found))
    return samples
