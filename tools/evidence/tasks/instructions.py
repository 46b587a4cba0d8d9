"""A system prompt with instructions, prose from the user, then requests to which each instruction applies.

Source: "The Pitfalls of KV Cache Compression", 2510.00231: some instructions are dropped whole while others survive, so the
worst one of each prompt is judged too.
"""

from __future__ import annotations

import random
from typing import Any

from ..chat import Frame
from ..samples import Probe, Sample
from ..texts import group_parts, sentences

COUNT, TOKENS = 4, 560
TOPICS: tuple[str, ...] = ("the weather", "refunds", "opening hours", "delivery", "passwords", "parking", "discounts")
TOPICS += ("complaints", "holidays", "invoices", "pets", "jobs")
WORDS: tuple[str, ...] = ("amber lantern", "silver kettle", "quiet meadow", "copper bridge", "violet harbour", "stone garden")
WORDS += ("paper crane", "golden anchor", "winter orchard", "marble fountain", "cedar ladder", "crystal window")
RULE = "When the user asks about {topic}, answer with the words: {words}."
ASK = "\n\nThank you. Now a question about {topic}: what do you say?"
LEAD = "About {topic} I answer with the words:"  # small models do not find these words by themselves


def write_system(i: int) -> tuple[list[tuple[str, str]], str]:
    """Return the topic and the words of each instruction of a sample, and its system message."""
    rng = random.Random(f"instructions {i}")
    rules = list(zip(rng.sample(TOPICS, COUNT), rng.sample(WORDS, COUNT), strict=True))
    return rules, "You are the assistant of a shop. " + " ".join(
        RULE.format(topic=topic, words=words) for topic, words in rules
    )


def make_samples(tokenizer: Any, count: int) -> list[Sample]:
    """Make samples with a probe per instruction; kind "first instruction" and so on."""
    samples = []
    for i, parts in enumerate(group_parts(tokenizer, sentences(), TOKENS, " ")[:count]):
        rules, system = write_system(i)
        frame = Frame(tokenizer, system)
        probes = [
            Probe(
                "instruction",
                frame.encode(ASK.format(topic=topic)) + frame.after + frame.encode(LEAD.format(topic=topic)),
                frame.encode(" " + words),
            )
            for topic, words in rules
        ]
        text = frame.encode("Here is a text for later.\n\n" + " ".join(parts))
        samples.append(Sample(f"instructions {i}", (frame.before + text,), tuple(probes)))
    return samples
