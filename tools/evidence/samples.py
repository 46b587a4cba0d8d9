"""A sample: token ids of a prompt, and what is read after it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any


def digest(*parts: Any) -> str:
    """Eight characters for the content of a sample."""
    plain = [part.tolist() if hasattr(part, "tolist") else part for part in parts]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Probe:
    """Tokens that follow the prompt: `lead` is only read, `answer` is judged.

    kind: what results are grouped by, such as "fact". Each probe starts from the cache as the prompt left it.
    """

    kind: str
    lead: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Sample:
    """A unit of evidence, over which intervals are drawn: independent of other samples in text and answers.

    name: unique in its task. turns: the prompt's ids, one tuple a turn; the budget is enforced after each.
    """

    name: str
    turns: tuple[tuple[int, ...], ...]
    probes: tuple[Probe, ...]

    @property
    def digest(self) -> str:
        """Eight characters for the ids, so that lines of another text are never taken for this one's."""
        return digest(self.turns, [(probe.kind, probe.lead, probe.answer) for probe in self.probes])


def ask(name: str, i: int, later: bool, read: tuple[int, ...], asked: list[tuple[tuple[int, ...], Probe]]) -> Sample:
    """Make the i-th sample of a text and (question, probe) pairs: one question ends the prompt, or all come `later`."""
    if later:
        probes = tuple(Probe(one.kind, question + one.lead, one.answer) for question, one in asked)
        return Sample(f"{name} later {i}", (read,), probes)
    (question, probe), *_ = asked
    return Sample(f"{name} {i}", (read + question,), (probe,))
