"""A list of keys with a number each: one is asked at the prompt's end, or several after compression."""

from __future__ import annotations

import random
from typing import Any

from ..chat import Frame
from ..samples import Probe, Sample
from .hidden import PLACES

ENTRIES, ASKED = 40, 4
HEAD = "Read this list of access codes.\n\n"
LINE = "- {place}: {code}"
LEAD = "\n\nWhat is the access code of the {place}? Answer with the code only."
ANSWER = "- {place}:"


def make_samples(tokenizer: Any, count: int) -> list[Sample]:
    """Make samples whose prompt ends with the question."""
    return _make_samples(tokenizer, count, later=False)


def make_later_samples(tokenizer: Any, count: int) -> list[Sample]:
    """Make samples whose questions come after the list was read and compressed."""
    return _make_samples(tokenizer, count, later=True)


def _make_samples(tokenizer: Any, count: int, later: bool) -> list[Sample]:
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
            found.append((question, frame.encode(ANSWER.format(place=place) + " "), frame.encode(codes[place])))
        if later:
            probes = tuple(Probe("code", question + lead, answer) for question, lead, answer in found)
            samples.append(Sample(f"lists later {i}", (read,), probes))
        else:
            question, lead, answer = found[0]
            samples.append(Sample(f"lists {i}", (read + question,), (Probe("code", lead, answer),)))
    return samples
