"""The question is in the prompt: one of the codes hidden in prose, judged after the words that lead to it."""

from __future__ import annotations

import random
from typing import Any

from ..chat import Frame
from ..samples import Probe, Sample
from ..texts import group_parts, sentences
from .hidden import ANSWER, FACTS, HEAD, LEAD, hide_codes

TOKENS = 640


def make_samples(tokenizer: Any, count: int, tokens: int = TOKENS) -> list[Sample]:
    """Make samples whose codes are asked in turn: the first of the text, the second ..."""
    frame, samples = Frame(tokenizer), []
    for i, parts in enumerate(group_parts(tokenizer, sentences(), tokens, " ")[:count]):
        hidden = hide_codes(parts, random.Random(f"facts {i}"))
        place, code = hidden.facts[i % FACTS]
        prompt = frame.before + frame.encode(HEAD + hidden.text + LEAD.format(place=place)) + frame.after
        # the first token of an answer comes from the prompt's own pass, which saw everything: the words before the code take it
        probe = Probe("fact", frame.encode(ANSWER.format(place=place)) + frame.encode(" "), frame.encode(code))
        samples.append(Sample(f"facts {i}", (prompt,), (probe,)))
    return samples
