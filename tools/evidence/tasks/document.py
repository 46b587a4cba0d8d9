"""A document is read and compressed before anything is asked: codes hidden in it, and how the text goes on."""

from __future__ import annotations

import random
from typing import Any

from ..chat import Frame
from ..samples import Probe, Sample
from ..texts import group_parts, sentences
from .hidden import ANSWER, HEAD, LEAD, hide_codes

TOKENS, TAIL, NEXT = 600, 110, 64


def make_samples(tokenizer: Any, count: int, tokens: int = TOKENS) -> list[Sample]:
    """Make samples: the text's last NEXT tokens are not read but judged; every other code is asked, in a turn of its own."""
    frame, samples = Frame(tokenizer), []
    for i, parts in enumerate(group_parts(tokenizer, sentences(), tokens + TAIL, " ")[:count]):
        head = group_parts(tokenizer, parts, tokens, " ")[0]
        hidden = hide_codes(head, random.Random(f"document {i}"))
        text = frame.encode(HEAD + " ".join([hidden.text, *parts[len(head) :]]))
        read, rest = text[:-NEXT], text[-NEXT:]
        probes = [Probe("next tokens", rest[:1], rest[1:])]
        for place, code in hidden.facts[i % 2 :: 2]:
            question = frame.encode(LEAD.format(place=place)) + frame.after
            probes.append(Probe("fact", question + frame.encode(ANSWER.format(place=place) + " "), frame.encode(code)))
        samples.append(Sample(f"document {i}", (frame.before + read,), tuple(probes)))
    return samples
