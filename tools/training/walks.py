"""A task with a long answer: walk through a graph and leave every node by each of its exits once, in the order given.

The prompt lists each node's exits; the trace keeps the book. A visit writes how often the node was left before, which exits
remain, and where the walk goes, which is the next visit's node:

    <bos> v07 m1 v12 v33 v05  v12 m1 v05 v07 v33 ... <q> v07   m2 v33 v05 v12   m2 v07 v33 v05   m2 ... v07 <eos>
          node   its exits                           start  ^ first visit       of v12           of v05

`v07 m2 v33 v05` says: left once, v33 and v05 remain. The next visit of v07, any number of tokens later, takes up from there,
writes `m3 v05` and goes to v33. What a visit needs is thus the newest record of its node and nothing else: the prompt's at
first, then one that the model wrote itself. That record is needed once more, at a distance that the graph decides, and
never again. Every edge is taken once and the walk ends where it began (an Euler circuit), so that there is one right trace.
Words and tokenizer are those of tasks.py. Dimension key: B rows, T tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from tools.training.tasks import BOS, EOS, HARD, MARKS, PAD, QUESTION, VALUES, Batch

NODES, EXITS = 32, 4
"""Of the walks that the shipped models are measured with: a prompt of 195 tokens, a trace of 449."""

Graph = dict[int, list[int]]
"""The exits of each node in the order in which the walk takes them."""


def prompt_tokens(nodes: int, exits: int) -> int:
    """<bos>, the records, <q> and the node where the walk starts."""
    return 3 + nodes * (2 + exits)


def trace_tokens(nodes: int, exits: int) -> int:
    """A visit writes a mark, what remains and the next node; <eos> ends the walk."""
    return nodes * sum(2 + exits - visit for visit in range(1, exits + 1)) + 1


def _draw(rng: random.Random, nodes: Sequence[int], exits: int) -> Graph:
    """`exits` different exits of every node, none to itself; as many lead to a node as away from it."""
    graph: Graph = {node: [] for node in nodes}
    while len(graph[nodes[0]]) < exits:
        targets = list(nodes)
        for _ in range(200):
            rng.shuffle(targets)
            clash = [i for i, node in enumerate(nodes) if targets[i] == node or targets[i] in graph[node]]
            for i in clash:  # a swap mends most of them
                j = rng.randrange(len(nodes))
                targets[i], targets[j] = targets[j], targets[i]
            if not any(target == node or target in graph[node] for node, target in zip(nodes, targets, strict=True)):
                break
        else:
            return _draw(rng, nodes, exits)
        for node, target in zip(nodes, targets, strict=True):
            graph[node].append(target)
    return graph


def _circuit(graph: Graph, start: int) -> list[int]:
    """The nodes of a closed walk over every edge that can be reached from `start` [Hierholzer]."""
    left = {node: list(exits) for node, exits in graph.items()}
    path, circuit = [start], []
    while path:
        if left[path[-1]]:
            path.append(left[path[-1]].pop())
        else:
            circuit.append(path.pop())
    return circuit[::-1]


def draw(rng: random.Random, nodes: int, exits: int) -> tuple[Graph, int]:
    """A graph whose exits stand in an order that takes every edge once, and the node to start from.

    Raises:
        ValueError: there are not so many nodes, or too few for the exits, or not so many marks.
    """
    if not exits < nodes <= len(VALUES):
        raise ValueError(f"nodes={nodes}: a graph with exits={exits} has {exits + 1} to {len(VALUES)} nodes")
    if not 0 < exits < len(MARKS):
        raise ValueError(f"exits={exits}: 1 to {len(MARKS) - 1}, for every visit has a mark of its own")
    while True:
        named = rng.sample(VALUES, nodes)
        edges, start = _draw(rng, named, exits), rng.choice(named)
        walk = _circuit(edges, start)
        if len(walk) == nodes * exits + 1:  # else the graph falls apart into several
            break
    graph: Graph = {node: [] for node in named}
    for node, target in zip(walk, walk[1:], strict=False):
        graph[node].append(target)
    return graph, start


def prompt(graph: Graph, start: int) -> list[int]:
    records = [token for node, exits in graph.items() for token in (node, MARKS[0], *exits)]
    return [BOS, *records, QUESTION, start]


def trace(graph: Graph, start: int) -> list[int]:
    """What is to be written behind the prompt."""
    left, node, written = {node: list(exits) for node, exits in graph.items()}, start, []
    while left[node]:
        to, *rest = left[node]
        written += [MARKS[len(graph[node]) - len(rest)], *rest, to]
        left[node], node = rest, to
    return [*written, EOS]


def walk(rng: random.Random, n_sequences: int, *, nodes: int = NODES, exits: int = EXITS) -> Batch:
    """Rows of prompt and trace. The one answer of a row is its whole trace."""
    drawn = [draw(rng, nodes, exits) for _ in range(n_sequences)]
    tokens_BT = torch.tensor([prompt(*one) + trace(*one) for one in drawn])
    n = prompt_tokens(nodes, exits)
    return Batch(tokens_BT, n, torch.arange(n, tokens_BT.shape[1])[None])


def training_batch(rng: random.Random, nodes: int, n_tokens: int) -> tuple[Tensor, Tensor]:
    """Tokens and loss weights [B, T] of walks over at most `nodes` nodes, some n_tokens in all.

    Half of the walks have as many nodes and exits as there may be, the others fewer.
    """
    rows: list[tuple[list[int], int]] = []
    longest = 0
    while not rows or (len(rows) + 1) * longest <= n_tokens:
        full = rng.random() < 0.5
        exits = min(EXITS, nodes - 1) if full else rng.randint(2, min(EXITS, nodes - 1))
        size = nodes if full else rng.randint(max(exits + 1, nodes // 2), nodes)
        asked = prompt(*(drawn := draw(rng, size, exits)))
        rows.append((asked + trace(*drawn), len(asked)))
        longest = max(longest, len(rows[-1][0]))
    tokens_BT = torch.full((len(rows), longest), PAD)
    weights_BT = torch.zeros(len(rows), longest)
    for i, (row, n) in enumerate(rows):
        tokens_BT[i, : len(row)] = torch.tensor(row)
        weights_BT[i, n : len(row)] = HARD
    return tokens_BT, weights_BT
