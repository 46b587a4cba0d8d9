"""A chat of eight turns under one budget: each brings prose with a code in it, and the last asks for codes of earlier ones."""

from __future__ import annotations

import random
from typing import Any

from ..chat import Frame
from ..samples import Probe, Sample
from ..texts import group_parts, sentences
from .hidden import ANSWER, LEAD, hide_codes

TURNS, TOKENS = 8, 75
ASKED = (0, 2, 4, 6)
ABOUT = "Note number {number}. {text}"
SAID = "I have read note number {number}."


def make_samples(tokenizer: Any, count: int) -> list[Sample]:
    """Make samples whose turns each read a message and the answer before it; every other turn's code is asked at the end."""
    frame, samples = Frame(tokenizer), []
    parts = group_parts(tokenizer, sentences(), TOKENS, " ")
    between, begin = frame.after, frame.before
    for i in range(min(count, len(parts) // TURNS)):
        turns, facts = [], []
        rng = random.Random(f"turns {i}")
        for n, own in enumerate(parts[i * TURNS : (i + 1) * TURNS]):
            hidden = hide_codes(own if len(own) > 1 else [*own, ""], rng, 1)
            message = frame.encode(ABOUT.format(number=n + 1, text=hidden.text))
            opened = begin if not n else frame.encode(SAID.format(number=n) + frame.between)
            turns.append(opened + message + between)
            facts += hidden.facts
        probes = []
        for n in ASKED:
            place, code = facts[n]
            question = frame.encode(SAID.format(number=TURNS) + frame.between + LEAD.format(place=place).strip()) + between
            probes.append(Probe("code", question + frame.encode(ANSWER.format(place=place) + " "), frame.encode(code)))
        samples.append(Sample(f"turns {i}", tuple(turns), tuple(probes)))
    return samples
