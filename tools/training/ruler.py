"""RULER's families in miniature, in contexts of any length: chains of facts, variables, counts [Hsieh et al. 2024].

Words, filler and rows are those of tasks.py, whose recall and needle are RULER's retrieval. What a row asks for is strewn among
filler and among records that nobody asks for, and at least one word of filler stands between two facts:

    hops      k07 k12 .. k12 k31 .. k31 v12 v31 v05 .. <q> k07   k12 k31 v12 v31 v05      where do the links lead?
    tracking  v40 k03 .. k03 k19 .. k19 k22 .. <q> v40   k03 k19 k22     which variables hold the value? links in their order
    counting  m3 .. m1 .. m3 .. <q> m3   2                               how often does the mark stand there?

The answers write every hop down, so that each of their tokens takes one look-up: the first is the only one that the question
itself points at. Dimension key: B sequences, T tokens, A answers per sequence, W tokens per answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from tools.training import tasks
from tools.training.tasks import BOS, EASY, FILLER, HARD, KEYS, MARKS, QUESTION, VALUES, Batch, Row

DIGITS = range(159, 169)
"""The bytes of 0 to 9."""

MOST = 5
"""Of one mark in a context."""

COUNTED = 4.0
"""Loss weight of a count: one token, where other answers have several. Not HARD: no stage of the curriculum waits for it."""

Fact = list[int]


def _strewn(rng: random.Random, length: int, facts: Sequence[Fact], ordered: bool = False) -> Row:
    """`length` tokens from <bos> on: the facts at random places among filler, in their order where that is asked for.

    Raises:
        ValueError: the facts, with one word of filler after each, do not fit.
    """
    room = length - 1 - sum(len(fact) + 1 for fact in facts)
    if room < 0:
        raise ValueError(f"length={length}: the facts and a word of filler after each need {length - room}")
    facts = list(facts)
    if not ordered:
        rng.shuffle(facts)
    places = sorted(rng.randint(0, room) for _ in facts)
    row, before = Row([BOS], [0.0]), 0
    for place, fact in zip(places, facts, strict=True):
        _fill(rng, row, place - before)
        row.add(fact, 0.0)
        _fill(rng, row, 1)
        before = place
    _fill(rng, row, room - before)
    return row


def _fill(rng: random.Random, row: Row, n: int) -> None:
    """`n` more words of the chain; the first after a fact is anything."""
    for _ in range(n):
        last = row.tokens[-1]
        known = last in FILLER
        row.add([rng.choice(tasks.SUCCESSORS[last] if known else FILLER)], EASY if known else 0.0)


def _chains(rng: random.Random, n: int, size: int) -> list[list[int]]:
    """`n` chains of `size` keys, all different."""
    if not 0 < n * size <= len(KEYS):
        raise ValueError(f"{n} chains of {size} keys: there are {len(KEYS)} keys")
    keys = rng.sample(KEYS, n * size)
    return [keys[i * size : (i + 1) * size] for i in range(n)]


def _links(chain: Sequence[int]) -> list[Fact]:
    return [list(pair) for pair in pairwise(chain)]


def _hops_row(rng: random.Random, length: int, hops: int, chains: int, questions: int) -> Row:
    values = rng.sample(VALUES, 3 * chains)
    drawn, records, facts = _chains(rng, chains, hops + 1), [], []
    for i, chain in enumerate(drawn):
        records.append(values[3 * i : 3 * i + 3])
        facts += [*_links(chain), [chain[-1], *records[-1]]]
    row = _strewn(rng, length, facts)
    for i in rng.sample(range(chains), questions):
        row.add([QUESTION, drawn[i][0]], 0.0)
        row.add([*drawn[i][1:], *records[i]], HARD)
    return row


def _tracking_row(rng: random.Random, length: int, names: int, chains: int, questions: int) -> Row:
    values, drawn = rng.sample(VALUES, chains), _chains(rng, chains, names)
    waiting = [[[value, chain[0]], *_links(chain)] for value, chain in zip(values, drawn, strict=True)]
    turns = [i for i, facts in enumerate(waiting) for _ in facts]
    rng.shuffle(turns)  # a variable is set before it is read, whatever other chains do meanwhile
    row = _strewn(rng, length, [waiting[i].pop(0) for i in turns], ordered=True)
    for i in rng.sample(range(chains), questions):
        row.add([QUESTION, values[i]], 0.0)
        row.add(drawn[i], HARD)
    return row


def _counting_row(rng: random.Random, length: int, marks: int, most: int, questions: int) -> Row:
    counts = {mark: rng.randint(1, most) for mark in rng.sample(MARKS, marks)}
    row = _strewn(rng, length, [[mark] for mark, count in counts.items() for _ in range(count)])
    for mark in rng.sample(list(counts), questions):
        row.add([QUESTION, mark], 0.0)
        row.add([DIGITS[counts[mark]]], COUNTED)
    return row


def _batch(rows: list[Row], context: int, in_prompt: bool, questions: int, width: int) -> Batch:
    """Every question is <q>, what is asked for, and an answer of `width` tokens."""
    answers_AW = context + 2 + (2 + width) * torch.arange(questions)[:, None] + torch.arange(width)
    return Batch(torch.tensor([row.tokens for row in rows]), context + (2 if in_prompt else 0), answers_AW)


def hops(
    rng: random.Random,
    n: int,
    *,
    context: int = 216,
    hops: int = 2,
    chains: int = 4,
    questions: int = 2,
    in_prompt: bool = False,
) -> Batch:
    """`chains` chains of `hops` links, each with a record at its end; an answer is the way and the record."""
    rows = [_hops_row(rng, context, hops, chains, questions) for _ in range(n)]
    return _batch(rows, context, in_prompt, questions, hops + 3)


def tracking(
    rng: random.Random,
    n: int,
    *,
    context: int = 216,
    names: int = 4,
    chains: int = 4,
    questions: int = 2,
    in_prompt: bool = False,
) -> Batch:
    """`chains` values, each held by `names` variables; an answer is the names in the order in which they got it."""
    rows = [_tracking_row(rng, context, names, chains, questions) for _ in range(n)]
    return _batch(rows, context, in_prompt, questions, names)


def counting(
    rng: random.Random,
    n: int,
    *,
    context: int = 216,
    marks: int = 4,
    most: int = MOST,
    questions: int = 4,
    in_prompt: bool = False,
) -> Batch:
    """`marks` marks that stand there 1 to `most` times; an answer is a digit."""
    rows = [_counting_row(rng, context, marks, most, questions) for _ in range(n)]
    return _batch(rows, context, in_prompt, questions, 1)


FAMILIES: dict[str, Callable[..., Batch]] = {"hops": hops, "tracking": tracking, "counting": counting}


def _training_row(rng: random.Random, length: int) -> Row:
    """One row of at most `length` tokens of any family; short rows have shorter chains."""
    family = rng.choice(list(FAMILIES))
    if family == "counting":
        marks = rng.randint(1, max(1, min(6, length // 12)))
        asked = rng.randint(1, marks)
        room = length - 3 * asked
        most = max(1, min(MOST, (room - 1) // (2 * marks)))
        return _counting_row(rng, room, marks, most, asked)
    size = rng.randint(1, 3 if length >= 48 else 1)
    width = size + 3 if family == "hops" else size + 1
    fact = 3 * size + 5 if family == "hops" else 3 * (size + 1)
    most = max(1, min((length - 1) // (fact + 2 + width), 8, len(KEYS) // (size + 1)))
    chains = rng.randint(1, most)
    asked = rng.randint(1, chains)
    room = length - asked * (2 + width)
    if family == "hops":
        return _hops_row(rng, room, size, chains, asked)
    return _tracking_row(rng, room, size + 1, chains, asked)


def training_batch(rng: random.Random, length: int, n_tokens: int, share: float, **others: float) -> tuple[Tensor, Tensor]:
    """Tokens and loss weights [B, length]: a `share` of the rows is of these families, the others are those of tasks.py."""
    rows = [
        _training_row(rng, length) if rng.random() < share else tasks.training_row(rng, length, **others)
        for _ in range(n_tokens // length)
    ]
    return tasks.padded(rows, length)
