"""Source code: a function's body, named by its signature, in the prompt or after compression."""

from __future__ import annotations

import random
from typing import Any

from ..chat import Frame
from ..samples import Probe, Sample, ask
from ..texts import functions, group_parts

TOKENS, BODY = 760, 48
HEAD = "Read these Python functions.\n\n"
ASK = "\n\nRepeat the whole function `{name}`."


def make_samples(tokenizer: Any, count: int, later: bool = False) -> list[Sample]:
    """Make samples whose prompt ends with the request; later: it comes after the functions were read and compressed."""
    frame, samples = Frame(tokenizer), []
    for i, parts in enumerate(group_parts(tokenizer, functions(), TOKENS, "\n\n")[:count]):
        chosen = random.Random(f"code {i}").choice(parts[:-1] or parts)
        start = chosen.index("def ")
        signature, _, body = chosen[start:].partition("\n")
        request = frame.encode(ASK.format(name=signature[4 : signature.index("(")])) + frame.after
        text = frame.before + frame.encode(HEAD + "\n\n".join(parts))
        lead, answer = frame.encode("```python\n" + signature + "\n"), frame.encode(body)[:BODY]
        samples.append(ask("code", i, later, text, [(request, Probe("body", lead, answer))]))
    return samples
