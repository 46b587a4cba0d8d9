"""The oracle: docs/policies/definitions.md computed literally, in float64, one row at a time, over explicit lists of tokens.

It shares no code with the library. Nothing is incremental that can be computed from its definition: every query row is
remembered, and a score is summed over the remembered rows at each decision. Symbols are those of that page:

    t, i   the query's and the key's token, as original positions      n   tokens of the prompt
    x, a   logits and probabilities of row t, by key i                 s   the scores of one KV head, by key i
    r      the size of a protected set                                 b   the budget of one layer
    l, g, h   layer, KV head, query head; query head h belongs to KV head h // G

A turn is a prompt and the decode steps after it; a text may have several. A moment is a time at which a layer evicts: at
the end of a turn's prompt (with block=, of each block) and after each decode step. reference_selection.py has the
arithmetic on budgets and the choice among scored tokens.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.oracle.reference_content import (
    compactor,
    expected_attention,
    lagged,
    learned_features,
    leverage,
    local_attention,
    probed,
    relative_norms,
    standardized,
    unlike_the_mean,
)
from tests.oracle.reference_decoding import looked_at, pooled, recurrence, redundancy, uses
from tests.oracle.reference_models import Decoder, decoder_of
from tests.oracle.reference_selection import (
    EPSILON,
    adaptive,
    budget,
    chunked,
    mass,
    merged,
    pyramid,
    refit,
    softmax,
    threshold,
    tokens,
    two_stage,
    whole_heads,
    worst,
)  # fmt: skip

Draw = Callable[[str, int, int, int, int], float]  # (kind, layer, head, t, i) -> the number drawn

EULER = 0.5772  # the mean of a standard Gumbel variable, as docs/policies/keyformer.md writes it
ROWS, READ = 16, 1024  # scores="sampled": rows of a block, and about how many rows are read
NEAR = 30  # a number this much nearer to a tie of its rounding than the margin of decisions may be rounded otherwise
FAR = 2.0**40  # beyond any position; position - FAR is exact in float64

SNAPKV: dict[str, Any] = {"score": "observation", "schedule": "prompt", "window": 32, "kernel": 7, "pooling": "max"}

REPEATED: dict[str, Any] = {"score": "repeated", "schedule": "prompt", "sinks": 4, "wrap": ("global_topk",), "floor": 0.0}
REPEATED |= {"instruction": (), "chunk": 2048}

DEFENSIVE: dict[str, Any] = {**SNAPKV, "score": "defensive", "kernel": 5, "pooling": "avg", "floor": 0.0}

# One line per policy: its score, then its options and their defaults. `recent` is the window that is never evicted.
POLICIES: dict[str, dict[str, Any]] = {
    "full": {"score": "none", "schedule": "never"},
    "random": {"score": "random"},
    "window": {"score": "recency"},
    "dilated_window": {"score": "lattice", "dilation": 1},
    "streaming_llm": {"score": "recency", "sinks": 4},
    "key_attention": {"score": "accumulated", "scores": "all"},
    "h2o": {"score": "accumulated", "scores": "all", "recent": 0.5},
    "scissorhands": {"score": "quantized", "scores": "all", "recent": 0.5},
    "tova": {"score": "last", "heads": "layer"},
    "roco": {"score": "mean", "scores": "all", "recent": 10, "protected": 0.5},
    "keyformer": {
        "score": "gumbel",
        "scores": "all",
        "recent": 0.3,
        "noise": "gumbel",
        "resample": False,
        "tau": (1.0, 2.0),
        "shared": False,
        "damping": 1.0,
    },
    "snapkv": SNAPKV,
    "pyramidkv": {**SNAPKV, "wrap": ("pyramid",)},
    "adakv": {**SNAPKV, "wrap": ("adaptive",)},
    "dropkv": {**SNAPKV, "score": "dropped", "pooling": "avg"},
    "critical_snapkv": {**SNAPKV, "wrap": ("critical",)},
    "critical_pyramidkv": {**SNAPKV, "wrap": ("pyramid", "critical")},
    "critical_adakv": {**SNAPKV, "wrap": ("adaptive", "critical")},
    "defensive_snapkv": {**DEFENSIVE, "wrap": ("adaptive", "critical")},
    "layer_defensive": {**DEFENSIVE, "wrap": ("global_topk", "critical")},
    "kvzip": REPEATED,
    "kvzip_plus": {**REPEATED, "outputs": True},
    "key_norm": {"score": "key_norm"},
    "key_diff": {"score": "key_diff"},
    "cur": {"score": "cur", "sinks": 4, "window": 16, "combine": "product"},
    "lag_kv": {"score": "lag", "schedule": "prompt", "sinks": 4, "lag": 128},
    "chunk_kv": {**SNAPKV, "wrap": ("chunked",)},
    "leverage": {"score": "leverage", "schedule": "prompt", "sketch": 48},
    "compactor": {
        "score": "compactor",
        "schedule": "prompt",
        "sinks": 8,
        "recent": 4,
        "sketch": 48,
        "chunk": 256,
        "blend": 0.35,
    },
    "expected_attention": {
        "score": "expected",
        "schedule": "prompt",
        "sinks": 4,
        "future": 512,
        "eps": 0.0,
        "covariance": True,
    },
    "q_filter": {"score": "projection", "calibration": None},
    "duo": {"score": "streaming", "sinks": 128, "recent": 256, "calibration": None},
    "learned": {
        "score": "learned",
        "schedule": "prompt",
        "sinks": 4,
        "wrap": ("global_topk",),
        "floor": 0.5,
        "calibration": None,
    },
    "tri_attention": {"score": "probe", "schedule": "decode", "every": 128, "calibration": None, "reach": 65536},
    "raas": {"score": "last_use", "schedule": "decode", "alpha": 1e-4},
    "lazy": {"score": "recurrence", "schedule": "decode", "alpha": 1e-4, "recent": 128, "every": 128},
    "r_kv": {"score": "redundancy", "every": 128, "window": 8, "kernel": 7, "pooling": "max", "weight": 0.1, "alike": 0.5},
    "vase": {
        "score": "sampled",
        "every": 64,
        "sinks": 4,
        "ranges": 0.25,
        "window": 64,
        "kernel": 5,
        "pooling": "avg",
    },
}
EVERY_POLICY: dict[str, Any] = {
    "sinks": 0,
    "recent": 0,
    "protect": None,
    "quota": None,
    "schedule": "both",
    "every": 1,
    "block": None,
    "positions": "original",
    "bits": 16,
    "wrap": (),
}
# What can be put around any policy, and the options that come with it.
WRAPS: dict[str, dict[str, Any]] = {
    "pyramid": {"beta": 20},
    "adaptive": {"floor": 0.2},
    "global_topk": {"floor": 0.2},
    "critical": {"alpha": 0.5, "eps": 1e-4, "norm": 1},
    "merged": {"threshold": 0.0, "schedule": "prompt"},
    "refit": {"ridge": 0.1, "queries": 256, "instruction": (), "chunk": 2048, "schedule": "prompt"},
    "chunked": {"size": 20, "together": True, "schedule": "prompt"},
}
OBSERVING = ("observation", "defensive", "dropped")
AT_THE_END = ("repeated", *OBSERVING, "lag", "expected", "leverage", "compactor")  # scores of a prompt's end alone
CONTENT = ("key_norm", "projection", "learned", "probe", "key_diff", "cur", "lag", "expected", "leverage", "compactor")
LATER = ("last_use", "recurrence")  # of generated tokens alone
RECENT = ("redundancy", "sampled")  # by the last queries, of the prompt or generated
# scores that may be negative, or that a factor would make no sense of
NO_WEIGHTS = ("random", "recency", "streaming", "lattice", "key_norm", "projection", "learned", "probe", "key_diff", "lag")
NO_WEIGHTS += ("compactor",)
NO_WEIGHTS += (*LATER, *RECENT)


@dataclass
class Run:
    """What one row gives: logits [tokens fed, V]; kept[moment][l][g] as sorted original positions, one moment at the end
    of each turn's prompt and one after each decode step; and the smallest gap at any decision: a run whose margin is
    below a rounding error may rightly differ from another."""

    logits: Tensor
    kept: list[list[list[list[int]]]]
    margin: float


@dataclass
class Row:
    """Query row t of one KV head: for every key i it attends to, one number per query head of the group."""

    t: int
    x: dict[int, list[float]]
    a: dict[int, list[float]]
    group: dict[int, float] = field(init=False)  # a averaged over the query heads of the group

    def __post_init__(self) -> None:
        self.group = {i: sum(a) / len(a) for i, a in self.a.items()}


def rounded(x: Tensor, bits: int, size: int) -> tuple[Tensor, float]:
    """x[D] with every `size` numbers rounded to 2^bits steps between their least and their greatest, and how far the nearest
    of them is from a tie between two steps."""
    result, margin = [], math.inf
    for start in range(0, len(x), size):
        numbers = x[start : start + size].tolist()
        zero, scale = min(numbers), (max(numbers) - min(numbers)) / (2**bits - 1)
        for number in numbers:
            steps = (number - zero) / scale if scale else 0.0
            code = round(steps)  # half to even
            margin = min(margin, (0.5 - abs(steps - code)) * scale) if scale else margin
            result.append(zero + scale * code)
    return torch.tensor(result, dtype=x.dtype), margin


def find_midrange(keys: Sequence[Tensor]) -> Tensor:
    """Of each channel, the number midway between its least and its greatest in these keys."""
    channels = zip(*(key.tolist() for key in keys), strict=True)
    return torch.tensor([(min(channel) + max(channel)) / 2 for channel in channels], dtype=keys[0].dtype)


# Scores: s[i] from the rows of one KV head. A row that could not see i (causality, a sliding window) has no entry i.
# `times(t)` is how often row t counts: once, unless the scores are of a sample of the rows.

Times = Callable[[int], int]


def once(t: int) -> int:
    return 1


def observed(rows: Sequence[Row], i: int, times: Times = once) -> list[tuple[float, int]]:
    """a[t, i], averaged over the group, of every row that could see i, and how often it counts; its own row is one."""
    return [(row.group[i], times(row.t)) for row in rows if i in row.group]


def accumulated(rows: Sequence[Row], i: int, times: Times = once) -> float:
    """AAS: s[i] = sum over t of a[t, i]."""
    return sum(a * count for a, count in observed(rows, i, times))


def mean(rows: Sequence[Row], i: int, times: Times = once) -> float:
    """MAS: s[i] = sum over t of a[t, i] / c[i]."""
    return accumulated(rows, i, times) / len(observed(rows, i))


def deviation(rows: Sequence[Row], i: int, times: Times = once) -> float:
    """sqrt(max(0, sum a^2 / c - (sum a / c)^2)); the square is of the averaged probability."""
    a = observed(rows, i, times)
    first, second = sum(value * count for value, count in a) / len(a), sum(value * value * count for value, count in a) / len(a)
    return math.sqrt(max(0.0, second - first * first))  # not first ** 2: one row must give 0 to the last bit


def last(rows: Sequence[Row], i: int) -> float:
    """LTAS: s[i] = a[T, i], T the newest row; 0 if T could not see i."""
    return rows[-1].group.get(i, 0.0)


def quantized(rows: Sequence[Row], i: int, times: Times = once) -> tuple[float, float]:
    """AQAS: s[i] = sum over t of 1[a[t, i] > 1/m], m the keys t attends to, per query head and then averaged.

    -> s[i] and the smallest |a * m - 1| met. The indicators are counted as integers and divided once, so that equal
    counts are equal scores. a = 1/m to the last bit (a row that sees one key) is no near-tie.
    """
    count, group, closest = 0, 1, math.inf
    for row in rows:
        if i in row.a and (often := times(row.t)):
            m, group = len(row.a), len(row.a[i])
            count += often * sum(a * m > 1.0 for a in row.a[i])
            closest = min([closest, *(abs(a * m - 1.0) for a in row.a[i] if a * m != 1.0)])
    return count / group, closest


def observation(rows: Sequence[Row], held: Sequence[int], w: int, kernel: int, pooling: str | None) -> dict[int, float]:
    """SnapKV: the mean of a[t, i] over the last w rows, for every held i but the newest w, then pooled among those: an
    i's neighbours are the next ones that are held. `held` is sorted. With w = 0 every score is 0."""
    if w == 0:
        return dict.fromkeys(held, 0.0)
    older = held[: len(held) - w]
    s = [sum(row.group.get(i, 0.0) for row in rows[-w:]) / w for i in older]
    half = kernel // 2
    near = [s[max(0, j - half) : j + half + 1] for j in range(len(s))]
    if pooling == "max":
        s = [max(values) for values in near]
    elif pooling == "avg":  # the zeros beyond either end count
        s = [sum(values) / kernel for values in near]
    return dict(zip(older, s, strict=True))


def defensive(rows: Sequence[Row], held: Sequence[int], w: int, kernel: int, pooling: str | None) -> dict[int, float]:
    """DefensiveKV: the largest a[t, i] over the last w rows and the query heads, for every held i but the newest w, no less
    than the mean of these. A row's numbers are first pooled among these tokens and scaled back to their own sum."""
    older = held[: len(held) - w]
    most, half = [0.0] * len(older), kernel // 2
    for row in rows[-w:] if w else []:
        for j in range(len(next(iter(row.a.values())))):
            a = [row.a[i][j] if i in row.a else 0.0 for i in older]
            near = [a[max(0, at - half) : at + half + 1] for at in range(len(a))]
            pooled = a
            if pooling == "max":
                pooled = [max(values) for values in near]
            elif pooling == "avg":
                pooled = [sum(values) / kernel for values in near]
            total = sum(pooled)
            pooled = [value / total * sum(a) for value in pooled] if total else pooled
            most = [max(pair) for pair in zip(most, pooled, strict=True)]
    least = sum(most) / len(most) if most else 0.0
    return {i: max(value, least) for i, value in zip(older, most, strict=True)}


def dropped(
    values: dict[int, Tensor], rows: Sequence[Row], held: Sequence[int], w: int, kernel: int, pooling: str | None
) -> dict[int, float]:
    """DropKV: the squared distance by which the output of a row moves when i is lost and the rest renormalized, summed over
    the last w rows, averaged over the query heads, pooled among all that is held; of every held i but the newest w."""
    s = dict.fromkeys(held, 0.0)
    for row in rows[-w:] if w else []:
        G = len(next(iter(row.a.values())))
        for j in range(G):
            output = sum((a[j] * values[i] for i, a in row.a.items()), torch.zeros(len(values[held[0]]), dtype=torch.float64))
            for i, a in row.a.items():
                move = a[j] / (1 - a[j] + 1e-6) * (output - values[i])
                s[i] += float(move @ move) / G
    numbers, half = [s[i] for i in held], kernel // 2
    near = [numbers[max(0, at - half) : at + half + 1] for at in range(len(held))]
    if pooling == "max":
        numbers = [max(some) for some in near]
    elif pooling == "avg":
        numbers = [sum(some) / kernel for some in near]
    return dict(zip(held[: len(held) - w], numbers, strict=False))


def gumbel_softmax(row: Row, zeta: Callable[[int, int], float], tau: float) -> dict[int, float]:
    """Keyformer: f[t, i] = softmax over i of (x[t, i] + zeta) / tau, averaged over the group.

    zeta(j, i) is the noise of key i for the j-th query head of the group.
    """
    group = len(next(iter(row.x.values())))
    f = dict.fromkeys(row.x, 0.0)
    for j in range(group):
        z = {i: (x[j] + zeta(j, i)) / tau for i, x in row.x.items()}
        top = max(z.values())
        total = sum(math.exp(value - top) for value in z.values())
        for i, value in z.items():
            f[i] += math.exp(value - top) / total / group
    return f


def lattice(i: int, dilation: int) -> float:
    """Recency over every (dilation + 1)-th token; any token of this lattice outranks all others, which come by recency
    as well."""
    return float(i) if i % (dilation + 1) == 0 else float(i) - FAR


class Oracle:
    """The state of one row: what each KV head holds, every query row it has seen, and the running Keyformer scores."""

    def __init__(
        self,
        decoder: Decoder,
        n: int,
        k: float | Sequence[float],
        options: dict[str, Any],
        generation_length: int,
        draw: Draw | None,
        turns: str = "all",
    ) -> None:
        """n is the length of the first turn's prompt."""
        L, K = decoder.layers, decoder.kv_heads
        self.decoder, self.k, self.options, self.T, self.draw = decoder, k, options, generation_length, draw
        self.turns = turns
        self.H, self.G = decoder.query_heads, decoder.query_heads // K
        if options["positions"] == "renumbered" and not decoder.renumbers:
            raise ValueError("positions='renumbered': this model's positions are learned, inside the hidden state")
        reaches = [decoder.reach(l) for l in range(L)]
        # Where some layers slide and others see all, the sliding ones bound themselves: the policy acts on the others.
        self.bounded = [window is not None and None in reaches for window in reaches]
        if options["score"] == "streaming":
            areas = [None if self.bounded[l] else options["calibration"].layers[l]["area"].tolist() for l in range(L)]
            self.k = whole_heads(k, areas, options["sinks"] + options["recent"])
        self.marked = {i for i, chosen in enumerate(options["protect"] or []) if chosen}
        self.protect: set[int] = set()  # those of the prompts so far
        numbers = options["quota"] or []
        self.spans = [{i for i, own in enumerate(numbers) if own == number} for number in sorted({*numbers} - {-1})]
        self.margin = math.inf
        self.keys: list[list[dict[int, Tensor]]] = [[{} for _ in range(K)] for _ in range(L)]
        self.values: list[list[dict[int, Tensor]]] = [[{} for _ in range(K)] for _ in range(L)]
        # what a token's own step saw of its key and value, and which tokens are rounded by now
        self.noted: list[list[dict[int, tuple[Tensor, Tensor]]]] = [[{} for _ in range(K)] for _ in range(L)]
        self.rounded: list[list[set[int]]] = [[set() for _ in range(K)] for _ in range(L)]
        # the centre of each head's keys, from the first prompt (or block) on
        self.centres: list[list[Tensor | None]] = [[None] * K for _ in range(L)]
        self.rows: list[list[list[Row]]] = [[[] for _ in range(K)] for _ in range(L)]
        # every query so far, of each query head, at its position
        self.asked: list[list[dict[int, Tensor]]] = [[{} for _ in range(self.H)] for _ in range(L)]
        # queries of the last pass without positions, [H, T, D], of each layer
        self.hidden: list[Tensor] = [torch.empty(0)] * L
        # Keyformer's running scores; with shared=True every layer adds to, and decides by, the same ones.
        running: list[list[dict[int, float]]] = [[{} for _ in range(K)] for _ in range(L)]
        self.running = [running[0]] * L if options.get("shared") else running
        self.repeated: list[list[dict[int, float]]] = [[{} for _ in range(K)] for _ in range(L)]  # of second readings
        self.asks: list[list[tuple[int, Tensor]]] = [[] for _ in range(L)]  # and the queries that a refit takes of them
        self.local: list[list[dict[int, float]]] = [[{} for _ in range(K)] for _ in range(L)]  # attention inside chunks
        self.zeta: dict[tuple[int, int, int], float] = {}
        self.tables: list[list[int | None] | None] = [None] * L  # budgets of each head, if k is a table
        self.moving: list[dict[str, Any]] = [{}] * L  # budgets that follow the text
        self.lost = [[0.0] * K for _ in range(L)]  # the scores of evicted tokens, under a budget by mass
        self.shares: list[list[int]] = [[0] * K for _ in range(L)]  # adaptive: what each head may hold while decoding
        self.seen = 0  # tokens of the text so far
        self.passes: list[range] = []  # the rows of each prompt, or block of one
        self.turn = -1
        self.begin(n)

    @property
    def newest(self) -> int:
        return self.seen - 1

    def begin(self, length: int) -> None:
        """A turn begins: its prompt has `length` tokens, and is about to be read."""
        if length == 0:
            raise ValueError("every turn begins with a prompt of at least one token")
        self.turn += 1
        self.step = 0  # 0: the prompt; j: decode step j of this turn
        self.start, self.n = self.seen, self.seen + length  # the prompt's tokens are start ... n - 1
        self.new = length  # query rows of the prompt, or block, that is being read
        self.before = [[set(head) for head in layer] for layer in self.keys]
        self.budgets = self.layer_budgets()
        self.protect |= {i for i in self.marked if self.start <= i < self.n}
        mine = self.protect - self.earlier()
        for b in self.budgets if self.options["schedule"] in ("prompt", "both") and not self.over() else []:
            if b is not None and len(mine) > b:
                raise ValueError(f"protect keeps {len(mine)} tokens, the budget is {b}")

    def over(self) -> bool:
        """Eviction is over: only the first turn's prompt was to be evicted from."""
        return self.turns == "first" and self.turn > 0

    def earlier(self) -> set[int]:
        """The positions of earlier turns, where the budget is for this turn's prompt alone."""
        return set(range(self.start)) if self.turns == "each" else set()

    def layer_budgets(self) -> list[int | None]:
        """The budget of each layer in this turn, in tokens; a layer that bounds itself has none."""
        L, o, bounded = self.decoder.layers, self.options, self.bounded
        of = self.n - self.start if self.turns == "each" else self.n
        if isinstance(self.k, dict):
            return [None if bounded[l] else self.layer_budget(l, self.k, of) for l in range(L)]
        if isinstance(self.k, Sequence):
            if "pyramid" in o["wrap"]:
                raise ValueError("pyramid divides one budget over the layers: k cannot be a list")
            if len(self.k) != L:
                raise ValueError(f"k has {len(self.k)} entries for {L} layers")
            self.tables = [[budget(one, of) for one in own] if isinstance(own, Sequence) else None for own in self.k]
            return [None if bounded[l] else self.layer_budget(l, value, of) for l, value in enumerate(self.k)]
        self.tables = [None] * L
        b = budget(self.k, of)
        if b is None or "pyramid" not in o["wrap"]:
            return [None if bounded[l] else b for l in range(L)]
        limit = None if o["schedule"] == "decode" else of
        parts = iter(pyramid(b, L - sum(bounded), o["beta"], self.observes(), limit))
        return [None if bounded[l] else next(parts) for l in range(L)]

    def layer_budget(self, l: int, k: Any, of: int) -> int | None:
        """The budget of a layer, which protected sizes are of: of a row of a table the smallest one; of a budget by scores
        the ceiling, or more tokens than there are."""
        self.moving[l] = k if isinstance(k, dict) else {}
        if isinstance(k, dict):
            if "share" in k:
                return budget(k["share"], of)
            return 2**30 if k.get("ceiling") is None else max(1, tokens(k["ceiling"], of))
        table = self.tables[l]
        if table is None:
            return budget(k, of)
        return None if all(one is None for one in table) else min(of if one is None else one for one in table)

    # Forward

    def forward(self, ids: Sequence[int]) -> Tensor:
        """The prompt, a block of it, or the one token of a decode step -> logits [T, V]. A layer evicts before the next
        one runs. A second reading belongs to the prompt: what it attends to is not rounded yet."""
        positions = torch.arange(self.seen, self.seen + len(ids))
        if self.step == 0:
            self.passes.append(range(self.seen, self.seen + len(ids)))
        self.seen, self.new = self.seen + len(ids), len(ids)
        x_TE = self.decoder.embed(torch.tensor(ids), positions)
        rereads = self.options["score"] == "repeated" or "refit" in self.options["wrap"]
        again = rereads and self.step == 0 and not self.over()
        for l in range(self.decoder.layers):
            x_TE = self.decoder.block(l, x_TE, partial(self.attend, l, positions))
            self.add_running(l, len(ids))
            if not self.waits(l) and not again:
                self.evict(l)
                self.round(l)
        waiting = [l for l in range(self.decoder.layers) if self.waits(l)]
        if again:
            self.read_again(list(ids))
            for l in range(self.decoder.layers):
                if not self.waits(l):
                    self.evict(l)
        self.evict_all(waiting)
        for l in range(self.decoder.layers):
            self.round(l)
        return self.decoder.logits(x_TE)

    def attend(self, l: int, positions: Tensor, h_TE: Tensor) -> Tensor:
        """Each new token is written, then attends to itself and to what its KV head holds and its window reaches.

        Renumbered, a token's place is its rank among those held at this moment; keys are held unrotated, and query and
        keys are rotated at their places. The window goes by original positions.
        """
        renumbered = self.options["positions"] == "renumbered"
        q, k, v = self.decoder.unplaced(l, h_TE) if renumbered else self.decoder.project(l, h_TE, positions)
        self.hidden[l] = h_TE
        if self.options["score"] == "compactor" and self.step == 0:
            for g in range(self.decoder.kv_heads):
                queries = [q[h] for h in range(g * self.G, (g + 1) * self.G)]
                size, begin = self.options["chunk"], self.options["sinks"]
                self.local[l][g] |= local_attention(positions.tolist(), queries, k[g], begin, size)
        y = q.new_zeros(*q.shape[:2], v.shape[-1])
        cap, oldest = self.decoder.softcap(l), torch.tensor([self.decoder.oldest(l, t) for t in positions.tolist()])
        for g in range(self.decoder.kv_heads):
            heads = range(g * self.G, (g + 1) * self.G)
            for index, t in enumerate(positions.tolist()):
                self.keys[l][g][t], self.values[l][g][t] = k[g, index], v[g, index]
            if self.centres[l][g] is None:
                self.centres[l][g] = find_midrange([*self.keys[l][g].values()])
            if self.step:
                self.round(l)
            for index, t in enumerate(positions.tolist()):
                self.noted[l][g][t] = self.keys[l][g][t], self.values[l][g][t]
                for h in heads:
                    self.asked[l][h][t] = q[h, index]
            held = sorted(self.keys[l][g])  # whose last tokens are the new ones
            places, new = torch.tensor(held), len(held) - len(positions)
            distance = places - positions[:, None]  # [T, S]
            seen = (distance <= 0) & (places >= oldest[:, None])
            keys = torch.stack([self.keys[l][g][i] for i in held])
            values = torch.stack([self.values[l][g][i] for i in held])
            query = q[heads.start : heads.stop]
            if renumbered:  # one table for all places of this forward, as for the positions of an ordinary one
                places = torch.arange(len(held))
                distance = places - places[new:, None]
                cos, sin = self.decoder.tables(l, places)
                keys, query = self.decoder.rotate(keys, cos, sin), self.decoder.rotate(query, cos[new:], sin[new:])
            slopes = torch.tensor([self.decoder.slope(h) for h in heads], dtype=torch.float64)[:, None, None]
            x = query @ keys.T * self.decoder.scale(l) + slopes * distance  # [G, T, S]
            x = x if cap is None else cap * torch.tanh(x / cap)
            x = torch.where(seen, x, -math.inf)
            sinks = [self.decoder.sink(l, h) for h in heads]
            if sinks[0] is None:
                a = torch.softmax(x, -1)
            else:  # in the denominator, but no key: a row's probabilities do not sum to one
                sink = torch.stack(sinks)[:, None, None].expand(-1, len(positions), 1)
                a = torch.softmax(torch.cat([x, sink], -1), -1)[..., :-1]
            y[heads.start : heads.stop] = a @ values
            x_of, a_of = (matrix.detach().permute(1, 2, 0).tolist() for matrix in (x, a))
            for index, t in enumerate(positions.tolist()):
                begin, count = int(seen[index].int().argmax()), int(seen[index].sum())  # a stretch of those held
                part = slice(begin, begin + count)
                x_row, a_row = (dict(zip(held[part], matrix[index][part], strict=True)) for matrix in (x_of, a_of))
                self.rows[l][g].append(Row(t, x_row, a_row))
        return self.decoder.output(l, y.transpose(0, 1).flatten(1))

    # A second reading

    def read_again(self, ids: list[int]) -> None:
        """KVzip: the prompt is repeated `chunk` tokens at a time, behind an instruction: one sequence of ids, or what stands
        before the first chunk, what stands before a later one and is followed by the 8 tokens before it, and what ends both."""
        given, size = self.options["instruction"], self.options["chunk"]
        first, later, close = given if given and not isinstance(given[0], int) else (given, given, ())
        self.asks = [[] for _ in self.asks]
        for begin in range(0, len(ids), size):
            chunk = ids[begin : begin + size]
            before = [*later, *ids[max(0, begin - 8) : begin]] if begin else [*first]
            text = [*before, *close, *chunk]
            span = range(self.start + begin, self.start + begin + len(chunk))
            positions = torch.arange(self.seen, self.seen + len(text))
            x_TE = self.decoder.embed(torch.tensor(text), positions)
            every = math.ceil(len(ids) / self.options.get("queries", len(ids)))
            for l in range(self.decoder.layers):
                x_TE = self.decoder.block(l, x_TE, partial(self.repeat, l, positions, span, every))

    def repeat(self, l: int, positions: Tensor, span: range, every: int, h_TE: Tensor) -> Tensor:
        """What a layer gives for the repeated rows, whose keys are not kept. s[i] for i in the span is the largest a[t, i] of
        them, over the query heads too, a being a softmax over the span, the sinks before it and the rows' own tokens."""
        q, k, v = self.decoder.project(l, h_TE, positions)
        self.asks[l] += [(t, q[:, r]) for r, t in enumerate(positions.tolist()) if r % every == 0]
        y = q.new_zeros(*q.shape[:2], v.shape[-1])
        cap, oldest = self.decoder.softcap(l), torch.tensor([self.decoder.oldest(l, t) for t in positions.tolist()])
        for h in range(self.H):
            g = h // self.G
            held = sorted(self.keys[l][g])
            near = [i for i in held if i in span or i < min(self.options["sinks"], span.start)]
            for among in (held, near) if self.options["score"] == "repeated" else (held,):
                tokens_S = torch.tensor([*among, *positions.tolist()])
                keys = torch.stack([*(self.keys[l][g][i] for i in among), *k[g]])
                values = torch.stack([*(self.values[l][g][i] for i in among), *v[g]])
                distance = tokens_S - positions[:, None]
                x = q[h] @ keys.T * self.decoder.scale(l) + self.decoder.slope(h) * distance
                x = x if cap is None else cap * torch.tanh(x / cap)
                x = torch.where((distance <= 0) & (tokens_S >= oldest[:, None]), x, -math.inf)
                sink = self.decoder.sink(l, h)
                if sink is not None:  # in the denominator
                    x = torch.cat([x, sink.expand(len(x), 1)], -1)
                a = torch.softmax(x, -1)[:, : len(tokens_S)]
                if among is held:
                    y[h] = a @ values
                    continue
                if self.options.get("outputs"):  # KVzip+: how far it moves the residual stream, to the row's size
                    moves = (values @ self.decoder.output_rows(l, h)).square().sum(-1)
                    a = a * (moves / h_TE.square().sum(-1, keepdim=True)).sqrt()
                for i, share in zip(tokens_S.tolist(), a.amax(0).tolist(), strict=True):
                    if i in span:
                        self.repeated[l][g][i] = max(self.repeated[l][g].get(i, 0.0), share)
        return self.decoder.output(l, y.transpose(0, 1).flatten(1))

    # Rows that are read

    def times(self, l: int, t: int) -> int:
        """How often row t counts. With scores="sampled": a row of the newest block of its pass once; any other block is read
        with probability 1/r, so its rows count r times if it is, else never. In a layer that slides all rows are read."""
        own = [rows for rows in self.passes if t in rows]
        if self.options.get("scores", "all") == "all" or not own or self.decoder.reach(l) is not None:
            return 1
        r = math.ceil(len(own[0]) / READ)
        block = (own[0][-1] - t) // ROWS
        if r == 1 or block == 0:
            return 1
        assert self.draw is not None
        group, place = divmod(block - 1, r)  # of every r blocks before the newest, the one that is drawn
        return r if place == int(self.draw("uniform", l, -1, -1, group) * r) else 0

    # Rounding

    def round(self, l: int) -> None:
        """Round what layer l holds and was not rounded before: a prompt's tokens (a block's) once they have attended and the
        layer has evicted, a generated token before it attends. A key is rounded by its difference from the head's centre, with
        a scale per group of channels; a value has one scale."""
        bits, group = self.options["bits"], self.options.get("group", 32)
        if bits == 16:
            return
        for g, (keys, values) in enumerate(zip(self.keys[l], self.values[l], strict=True)):
            centre = self.centres[l][g]
            for i in [i for i in keys if i not in self.rounded[l][g]]:
                assert centre is not None
                self.rounded[l][g].add(i)
                D, V = len(keys[i]), len(values[i])
                size = D // next(count for count in range(1, D + 1) if D % count == 0 and D // count <= group)
                if self.decoder.latent:  # no scale is shared by channels inside the value and others
                    size = max(size for size in range(1, group + 1) if D % size == 0 and V % size == 0)
                difference, margin = rounded(keys[i] - centre, bits, size)
                keys[i], value_margin = centre + difference, math.inf
                if self.decoder.latent:
                    values[i] = keys[i][:V]
                else:
                    values[i], value_margin = rounded(values[i], bits, V)
                self.margin = min(self.margin, NEAR * margin, NEAR * value_margin)

    # Keyformer's running score

    def tau(self) -> float:
        """tau_init for prompt rows; at decode step t of a turn it has gone t/T of the way to tau_end."""
        init, end = self.options["tau"]
        return init + min(self.step, self.T) * (end - init) / self.T

    def noise(self, l: int, g: int, t: int, j: int, i: int) -> float:
        """zeta of key i for the j-th query head of KV head g: drawn once per layer, query head and key; with resample
        afresh for every query t."""
        kind, h = self.options["noise"], g * self.G + j
        if kind in ("none", "constant"):
            return EULER if kind == "constant" else 0.0
        assert self.draw is not None
        if self.options["resample"]:
            return self.draw(kind, l, h, t, i)
        if (l, h, i) not in self.zeta:
            self.zeta[l, h, i] = self.draw(kind, l, h, -1, i)
        return self.zeta[l, h, i]

    def add_running(self, l: int, new: int) -> None:
        """s[i] <- damping * s[i] + the sum of f[t, i] over the `new` last rows: a whole prompt is one addition, so is
        each block and each step. With shared scores a layer adds to, and damps, the tokens that it holds itself."""
        if self.options["score"] != "gumbel" or self.bounded[l]:
            return
        for g in range(self.decoder.kv_heads):
            s = self.running[l][g]
            for i in self.keys[l][g]:
                s[i] = self.options["damping"] * s.get(i, 0.0)
            for row in self.rows[l][g][-new:]:
                for i, f in gumbel_softmax(row, partial(self.noise, l, g, row.t), self.tau()).items():
                    s[i] += f * self.times(l, row.t)

    # Eviction

    def outside(self, l: int, g: int) -> set[int]:
        """Tokens that are kept whatever happens and do not count in b: with schedule "decode" the prompt, with turns
        "each" what was held when a later turn began."""
        if self.options["schedule"] == "decode":
            return set(range(self.n))
        return self.before[l][g] if self.turns == "each" else set()

    def observes(self) -> int:
        """The query rows of the observation window."""
        return self.options["window"] if self.options["score"] in (*OBSERVING, *RECENT) else 0

    def sinks(self, b: int) -> int:
        """The sinks, clamped so that they and the protected tokens fit the budget."""
        read, sinks = {i for i in self.protect if i < self.seen}, tokens(self.options["sinks"], b)
        while len((set(range(sinks)) | read) - self.earlier()) > b:
            sinks -= 1
        return sinks

    def sizes(self, b: int) -> tuple[set[int], int, int, int]:
        """The fixed tokens (sinks and protect), then recent', RoCo's r' and the observation window w', clamped so that
        together they fit the budget. With schedule "decode" the prompt is fixed and is not counted in b."""
        o = self.options
        if o["schedule"] == "decode":
            fixed, room = set(range(self.n)), b
        else:
            read = {i for i in self.protect if i < self.seen}
            fixed = (set(range(self.sinks(b))) | read) - self.earlier()
            room = b - len(fixed)
        recent = min(tokens(o["recent"], b), room)
        w = tokens(self.observes(), b)
        if o["score"] in RECENT:
            w = min(w, room, b)
        else:  # a window that would leave no room to the score takes half
            w = min(w if w < room else (room + 1) // 2, self.new)
        r = min(tokens(o.get("protected", o.get("ranges", 0)), b), room - max(recent, w))
        return fixed, recent, r, w

    def evictable(self, l: int, g: int, b: int) -> list[int]:
        """The scope: outside the fixed tokens, the newest, and RoCo's top r' by standard deviation, or VaSE's by the range of
        the values, of which the sinks are the first."""
        fixed, recent, r, w = self.sizes(b)
        held = sorted(self.keys[l][g])
        newest = set(held[max(len(held) - max(recent, w), 0) :])
        top: set[int] = set()
        if "ranges" in self.options and r > 0:
            wide = {i: float(max(v) - min(v)) for i, v in self.values[l][g].items() if i not in self.outside(l, g) | newest}
            sinks = {i for i in wide if i < self.sinks(b)} if self.options["schedule"] != "decode" else set()
            rest, margin = worst(
                {i: spread for i, spread in wide.items() if i not in sinks}, min(len(wide) - len(sinks), len(wide) - r)
            )
            self.margin = min(self.margin, margin)
            top = set(wide) - rest
        elif r > 0:
            ranked = [i for i in held if i not in self.outside(l, g)]
            std = {i: deviation(self.rows[l][g], i, partial(self.times, l)) for i in ranked}
            rest, margin = worst(std, len(std) - r)
            self.margin = min(self.margin, margin)
            top = set(ranked) - rest
        free = [i for i in held if i not in fixed | self.outside(l, g) | newest | top]
        own = self.shares_of_spans(l, g, b, free) if self.spans else set()
        return [i for i in free if i not in own]

    def quota(self, b: int, span: set[int]) -> int:
        """The tokens that a head keeps of a span: its share of the budget, floor(b |s| / n)."""
        n = self.n - self.start if self.turns == "each" else self.n
        return min(len(span), b * len(span) // n)

    def shares_of_spans(self, l: int, g: int, b: int, free: list[int]) -> set[int]:
        """What a head keeps for the spans' sake: in each the top by score of what is free, beside its protected tokens, so that
        they reach its quota. Where that is more than the budget has room for, what each lacks is cut in proportion."""
        counted = [i for i in self.keys[l][g] if i not in self.outside(l, g)]
        room = b - (len(counted) - len(free))
        could = [[i for i in free if i in span and not self.dead(l, i)] for span in self.spans]
        lacks = []
        for span, own in zip(self.spans, could, strict=True):
            stay = sum(1 for i in counted if i in span and i not in free)
            lacks.append(max(0, min(self.quota(b, span) - stay, len(own))))
        if (total := sum(lacks)) > room:
            lacks = [lack * room // total for lack in lacks]
        s, kept = self.scores(l, g, b, free), set[int]()
        for lack, own in zip(lacks, could, strict=True):
            rest, margin = worst({i: s[i] for i in own}, len(own) - lack)
            self.margin = min(self.margin, margin)
            kept |= set(own) - rest
        return kept

    def scores(self, l: int, g: int, b: int, candidates: list[int]) -> dict[int, float]:  # noqa: C901
        """s[i] of every candidate."""
        o, rows, times = self.options, self.rows[l][g], partial(self.times, l)
        match o["score"]:
            case "random":
                assert self.draw is not None
                u = {i: self.draw("uniform", l, g, self.newest, i) for i in sorted(self.keys[l][g])}
                return {i: u[i] for i in candidates}
            case "recency" | "streaming":
                return {i: float(i) for i in candidates}
            case "lattice":
                return {i: lattice(i, o["dilation"]) for i in candidates}
            case "accumulated":
                return {i: accumulated(rows, i, times) for i in candidates}
            case "quantized":
                counts = {i: quantized(rows, i, times) for i in candidates}
                self.margin = min([self.margin, *(closest for _, closest in counts.values())])
                return {i: count for i, (count, _) in counts.items()}
            case "mean":
                return {i: mean(rows, i, times) for i in candidates}
            case "last" if o["heads"] == "layer":  # all heads of the layer have one score for a token that all hold
                newest_rows = [head[-1] for head in self.rows[l]]
                return {i: sum(sum(row.a.get(i, [0.0])) for row in newest_rows) / self.H for i in candidates}
            case "last":
                return {i: last(rows, i) for i in candidates}
            case "gumbel" | "repeated":
                summed = self.running if o["score"] == "gumbel" else self.repeated
                return {i: summed[l][g].get(i, 0.0) for i in candidates}
            case "observation" | "defensive" | "dropped":
                held, change = sorted(self.keys[l][g]), partial(dropped, self.values[l][g])
                score = {"observation": observation, "defensive": defensive, "dropped": change}[o["score"]]
                s = score(rows, held, self.sizes(b)[3], o["kernel"], o["pooling"])
                return {i: s[i] for i in candidates}
            case "last_use" | "recurrence":
                return self.scores_of_uses(rows, candidates)
            case "redundancy" | "sampled":
                s = self.recent_scores(l, g, self.sizes(b)[3])
                return {i: s[i] for i in candidates}
            case content if content in CONTENT:
                s = self.content_scores(l, g, b)
                return {i: s[i] for i in candidates}
        raise ValueError(o["score"])

    def scores_of_uses(self, rows: Sequence[Row], candidates: list[int]) -> dict[int, float]:
        """s[i] of generated tokens, which generated tokens alone can use."""
        s = {}
        for i in candidates:
            steps, closest = uses([(row.t, row.group) for row in rows], i, self.options["alpha"])
            s[i] = float(steps[-1]) if self.options["score"] == "last_use" else recurrence(steps, self.newest)
            self.margin = min(self.margin, closest)
        return s

    def recent_logits(self, l: int, g: int, t: int, older: list[int]) -> list[dict[int, float]]:
        """x[t, i] of the older tokens that the query of t may see, for each query head of the group, with queries and keys at
        their places of now: renumbered, a query's is counted back from the newest token's."""
        held, renumbered = sorted(self.keys[l][g]), self.options["positions"] == "renumbered"
        place = {i: rank if renumbered else i for rank, i in enumerate(held)}
        place[t] = max(0, len(held) - 1 - (self.newest - t)) if renumbered else t

        def placed(vector: Tensor, i: int) -> Tensor:
            if not renumbered:
                return vector
            cos, sin = self.decoder.tables(l, torch.arange(len(held)))
            return self.decoder.rotate(vector[None], cos[[place[i]]], sin[[place[i]]])[0]

        cap, x = self.decoder.softcap(l), []
        for h in range(g * self.G, (g + 1) * self.G):
            query, own = placed(self.asked[l][h][t], t), {}
            for i in [i for i in older if i >= self.decoder.oldest(l, t)]:
                product = float(placed(self.keys[l][g][i], i) @ query) * self.decoder.scale(l)
                product += self.decoder.slope(h) * (place[i] - place[t])
                own[i] = product if cap is None else cap * math.tanh(product / cap)
            x.append(own)
        return x

    def recent_scores(self, l: int, g: int, w: int) -> dict[int, float]:
        """s[i] of the held tokens before the text's last w, by the queries of these."""
        o, held = self.options, sorted(self.keys[l][g])
        older = [i for i in held if i <= self.newest - w]
        x = [self.recent_logits(l, g, t, older) for t in range(max(0, self.newest - w + 1), self.newest + 1)]
        a = pooled(looked_at(x, older, most=o["score"] == "redundancy"), o["kernel"], o["pooling"])
        shares = dict(zip(older, a, strict=True))
        if o["score"] == "sampled":
            assert self.draw is not None
            unseen = 1e-300
            return {i: math.log(max(a, unseen)) + self.draw("gumbel", l, g, self.newest, i) for i, a in shares.items()}
        like, margin = redundancy({i: self.keys[l][g][i] for i in held}, o["alike"])
        self.margin = min(self.margin, margin)
        return {i: o["weight"] * a - (1 - o["weight"]) * like[i] for i, a in shares.items()}

    def content_scores(self, l: int, g: int, b: int) -> dict[int, float]:
        """s[i] of every held token, from keys, values and queries themselves."""
        o, keys, values, noted = self.options, self.keys[l][g], self.values[l][g], self.noted[l][g]
        match o["score"]:
            case "key_norm":
                return {i: -math.sqrt((noted[i][0] ** 2).sum().item()) for i in keys}
            case "projection":
                direction = o["calibration"].layers[l]["direction"][g].double()
                return {i: float(noted[i][0] @ direction) for i in keys}
            case "learned":
                weight = o["calibration"].layers[l]["weight"][g].double()
                return {i: float(learned_features(*noted[i], i) @ weight) for i in keys}
            case "probe":
                return self.probed(l, g)
            case "key_diff":
                return unlike_the_mean(keys)
            case "cur":
                return relative_norms({i: noted[i] for i in keys}, o["window"], o["combine"])
            case "leverage":
                return self.leverage(l, g, list(keys))
            case "compactor":
                return self.compactor_scores(l, b)[g]
        begin = max(self.sinks(b), self.start if self.turns == "each" else 0)
        if o["score"] == "expected":
            heads, first = range(g * self.G, (g + 1) * self.G), self.seen - self.new
            counted = [at for at in range(self.new) if first + at >= o["sinks"]]
            q_HTD = self.decoder.unplaced(l, self.hidden[l])[0]
            queries = [[q_HTD[h, at] * self.decoder.scale(l) for at in counted] for h in heads]
            coming = self.decoder.rotations(l, self.seen + o["future"])[self.seen :].mean(0)
            slopes = [self.decoder.slope(h) for h in heads]
            return expected_attention(keys, values, queries, coming, slopes, begin, o["eps"], o["covariance"])
        s, margin = lagged(keys, values, sum(1 for i in keys if i < begin), o["lag"])
        self.margin = min(self.margin, margin)
        return s

    def probed(self, l: int, g: int) -> dict[int, float]:
        """s[i] of every held token by the mean queries of a calibration: the greatest of the group's standardized logits."""
        o, found = self.options, self.options["calibration"].layers[l]
        turned, pairs = self.decoder.rotations(l, self.seen), [tuple(pair) for pair in found["pairs"].tolist()]
        plain = {i: torch.linalg.solve(turned[i].T, key) @ turned[0] for i, key in self.keys[l][g].items()}  # at position 0
        whole = o["schedule"] != "decode"
        heads = []
        for mean, norms in zip(found["mean"][g].double(), found["norm"][g].tolist(), strict=True):
            x = {i: probed(plain[i], i, mean, norms, pairs, found["turn"].tolist(), self.newest + 1, o["reach"]) for i in plain}
            heads.append(standardized(x, [i for i in x if whole or i >= self.n]))
        return {i: max(head[i] for head in heads) for i in plain}

    def leverage(self, l: int, g: int, among: list[int]) -> dict[int, float]:
        """The leverage of held keys among some of them."""
        turned = self.decoder.rotations(l, self.seen)
        plain = {i: torch.linalg.solve(turned[i].T, self.keys[l][g][i]) for i in among}
        assert self.draw is not None
        D, columns = self.decoder.D, self.options["sketch"]
        numbers = [[self.draw("normal", l, g, d, j) for j in range(columns)] for d in range(D)]
        return leverage(plain, torch.tensor(numbers, dtype=torch.float64) / math.sqrt(columns))

    def compactor_scores(self, l: int, b: int) -> list[dict[int, float]]:
        """s[i] of each head's tokens behind the sinks and before the recent ones."""
        begin = max(self.sinks(b), self.start if self.turns == "each" else 0)
        last = self.newest - self.sizes(b)[1]
        among = [[i for i in sorted(head) if begin <= i <= last] for head in self.keys[l]]
        outliers = [self.leverage(l, g, own) for g, own in enumerate(among)]
        return compactor(self.local[l], self.values[l], outliers, self.options["blend"])

    def heads_together(self) -> bool:
        """Scores look at all heads of a layer, so that they are computed before any head evicts."""
        return "chunked" in self.options["wrap"] or self.options["score"] == "compactor"

    def norms(self, l: int, g: int, candidates: list[int]) -> dict[int, float]:
        """N[i]: the mean, over the query heads of the group, of ||v[i] W_O||, W_O the rows of that query head."""
        heads = range(g * self.G, (g + 1) * self.G)
        o, result = self.options, {}
        once = o["schedule"] == "prompt" and "global_topk" not in o["wrap"]
        for i in candidates:
            value = self.values[l][g][i] if once else self.noted[l][g][i][1]
            changes = [(value @ self.decoder.output_rows(l, h)).tolist() for h in heads]
            if self.options["norm"] == 1:
                sizes = [sum(abs(value) for value in change) for change in changes]
            else:
                sizes = [math.sqrt(sum(value * value for value in change)) for change in changes]
            result[i] = sum(sizes) / len(sizes)
        return result

    def dead(self, l: int, i: int) -> bool:
        """No query from the next one on can see i in layer l: it has left the window for good."""
        return i < self.decoder.oldest(l, self.newest + 1)

    def slide(self, l: int) -> None:
        """A layer that bounds itself holds its window's newest tokens, whatever policy, budget and schedule are."""
        window = self.decoder.reach(l)
        assert window is not None
        for g in range(self.decoder.kv_heads):
            for i in [i for i in self.keys[l][g] if self.newest - i >= window]:
                del self.keys[l][g][i], self.values[l][g][i]

    def evict(self, l: int) -> None:
        """Evict layer l's heads back to the budget, if this is a moment at which the schedule evicts."""
        if self.bounded[l]:
            self.slide(l)
            return
        o, b, K = self.options, self.budgets[l], self.decoder.kv_heads
        due = o["schedule"] == "both" or (o["schedule"] == ("decode" if self.step else "prompt"))
        if b is None or not due or self.over():
            return
        if "mass" in self.moving[l] or "threshold" in self.moving[l]:
            for g in range(K):
                self.evict_by_score(l, g, b)
            return
        shares = self.head_budgets(l, b)
        scored = self.scores_of_heads(l, b, [self.evictable(l, g, b) for g in range(K)]) if self.heads_together() else None
        for g, share in enumerate(shares):
            self.evict_head(l, g, b, share, scored[g] if scored else None)
        if "adaptive" in o["wrap"] and self.step == 0:
            held = [len(head) for head in self.keys[l]]
            extra = max(0, K * b - sum(held))  # more than 0 only while the cache is not full yet
            self.shares[l] = [held[g] + extra // K + (1 if g < extra % K else 0) for g in range(K)]

    def evict_by_score(self, l: int, g: int, b: int) -> None:
        """Evict from KV head g what a budget by scores lets go. A window's own tokens, which have no score, count as 0."""
        rule, o = self.moving[l], self.options
        held, outside, free = sorted(self.keys[l][g]), self.outside(l, g), self.evictable(l, g, b)
        window = set(held[max(len(held) - self.sizes(b)[3], 0) :]) if self.observes() else set()
        scored = self.scores(l, g, b, [i for i in held if i not in window])
        s = {i: scored.get(i, 0.0) for i in held if i not in outside}
        dead = partial(self.dead, l)
        if "threshold" in rule:
            victims, margin = threshold(s, free, rule["threshold"], dead)
            if len(victims) == len(held):
                best = max((i for i in held if not dead(i)), key=lambda i: (s[i], i))
                victims = victims - {best}
        else:
            adds_up = o["score"] in ("accumulated", "quantized", "mean", "gumbel")
            of = self.n - self.start if self.turns == "each" else self.n
            lost, least = self.lost[l][g] if adds_up else 0.0, max(1, tokens(rule["floor"], of))
            most = math.inf if rule["ceiling"] is None else b
            victims, margin, self.lost[l][g] = mass(s, free, rule["mass"], lost, min(least, b), most, dead)
        self.margin = min(self.margin, margin)
        self.drop(l, g, victims)

    def waits(self, l: int) -> bool:
        """With one budget for all layers none evicts before all have read the prompt."""
        return "global_topk" in self.options["wrap"] and self.step == 0 and self.budgets[l] is not None

    def evict_all(self, layers: list[int]) -> None:
        """One ranking over the heads of these layers, so that together they keep the sum of their budgets."""
        if not layers or self.over():
            return
        K, heads = self.decoder.kv_heads, [(l, g) for l in layers for g in range(self.decoder.kv_heads)]
        b_of = {l: b for l, b in enumerate(self.budgets) if b is not None}
        total = sum(K * b_of[l] for l in layers)
        counted = [len(self.keys[l][g]) - len(self.outside(l, g)) for l, g in heads]
        counts = counted
        if sum(counted) > total:
            s = []
            for l in layers:
                s += self.scores_of_heads(l, b_of[l], [self.evictable(l, g, b_of[l]) for g in range(K)])
            must_stay = [number - len(own) for number, own in zip(counted, s, strict=True)]
            dead = self.dead  # at a prompt's end no layer of these differs in what it can see
            counts, margin = adaptive(
                must_stay, s, [self.guaranteed(l, b_of[l]) for l, _ in heads], total, lambda i: dead(layers[0], i)
            )
            self.margin = min(self.margin, margin)
            for (l, g), own, count in zip(heads, s, counts, strict=True):
                self.evict_head(l, g, b_of[l], count, own if self.heads_together() else None)
        held = [len(self.keys[l][g]) for l, g in heads]
        extra = max(0, total - sum(held))
        for place, (l, g) in enumerate(heads):
            self.shares[l][g] = held[place] + extra // len(heads) + (1 if place < extra % len(heads) else 0)

    def guaranteed(self, l: int, b: int) -> int:
        """The tokens that a head keeps in any case where heads share a budget."""
        fixed, recent, r, w = self.sizes(b)
        held = {i for head in self.keys[l] for i in head}
        spans = sum(self.quota(b, span) for span in self.spans if span & held)
        return max(tokens(float(self.options["floor"]), b), min(len(fixed) + max(recent, w) + r + spans, b))

    def head_budgets(self, l: int, b: int) -> list[int]:
        """How many tokens each KV head of the layer may keep now, not counting those outside the budget."""
        K, table = self.decoder.kv_heads, self.tables[l]
        if "share" in self.moving[l] and self.step > 0:
            return [max(1, math.floor(self.moving[l]["share"] * self.seen + EPSILON))] * K
        if table is not None:  # a head that keeps everything has no budget
            return [len(self.keys[l][g]) if one is None else one for g, one in enumerate(table)]
        if "global_topk" in self.options["wrap"] and self.step > 0:
            return self.shares[l]
        if "adaptive" not in self.options["wrap"]:
            return [b] * K
        if self.step > 0:  # the budgets of the prompt's end
            return self.shares[l]
        counted = [len(self.keys[l][g]) - len(self.outside(l, g)) for g in range(K)]
        if sum(counted) <= K * b:
            return counted
        free = [self.evictable(l, g, b) for g in range(K)]
        s = self.scores_of_heads(l, b, free)
        must_stay = [counted[g] - len(free[g]) for g in range(K)]
        counts, margin = adaptive(must_stay, s, [self.guaranteed(l, b)] * K, K * b, partial(self.dead, l))
        self.margin = min(self.margin, margin)
        return counts

    def scores_of_heads(self, l: int, b: int, free: list[list[int]]) -> list[dict[int, float]]:
        """s[i] of the candidates of each head, before any of them evicts."""
        o, s = self.options, [self.scores(l, g, b, own) for g, own in enumerate(free)]
        if "chunked" not in o["wrap"]:
            return s
        return chunked(s, o["size"], o["together"], lambda i: not self.dead(l, i))

    def evict_head(self, l: int, g: int, b: int, share: int, scored: dict[int, float] | None) -> None:
        """Evict until KV head g holds `share` tokens and those outside the budget. Protected sizes are of b."""
        o, limit = self.options, share + len(self.outside(l, g))
        excess = len(self.keys[l][g]) - limit
        if excess < (self.options["every"] if self.step else 1):  # while decoding, tokens wait until so many can go
            return
        free, dead = self.evictable(l, g, b), partial(self.dead, l)
        if excess > len(free):  # its share is less than what b protects: no definition says which of these stay
            self.margin = 0.0
            self.drop(l, g, {*free, *sorted(i for i in self.keys[l][g] if i not in free)[: excess - len(free)]})
            return
        s = self.scores(l, g, b, free) if scored is None else scored
        if "critical" in o["wrap"]:
            c = max(0, limit - (len(self.keys[l][g]) - len(free)))  # what the protected tokens leave
            victims, margin = two_stage(s, self.norms(l, g, free), c, o["alpha"], o["eps"], dead)
        else:
            victims, margin = worst(s, excess, dead)
        self.margin = min(self.margin, margin)
        self.drop(l, g, victims)

    def drop(self, l: int, g: int, victims: set[int]) -> None:
        """Forget these tokens, with merged() once their values are folded into those of what stays."""
        if "merged" in self.options["wrap"]:
            folded = {i for i in victims if not self.dead(l, i)}
            keys = {i: key for i, key in self.keys[l][g].items() if i in folded or i not in victims}
            values, margin = merged(keys, self.values[l][g], folded, self.options["threshold"])
            self.values[l][g] |= values
            self.rounded[l][g] -= set(values)  # written anew; a key that is rounded twice stays what it is
            self.margin = min(self.margin, margin)
        stays = sorted(set(self.keys[l][g]) - victims)
        if "refit" in self.options["wrap"] and stays and any(not self.dead(l, i) for i in victims):
            values = refit(stays, self.values[l][g], self.weights_of_asks(l, g, set(stays)), self.options["ridge"])
            self.values[l][g] |= values
            self.rounded[l][g] -= set(values)
        for i in victims:
            del self.keys[l][g][i], self.values[l][g][i]

    def weights_of_asks(self, l: int, g: int, stays: set[int]) -> list[tuple[dict[int, float], dict[int, float]]]:
        """What each query that asks gives to the tokens it sees of KV head g, and what it would if only `stays` were there."""
        found = []
        for t, q in self.asks[l]:
            for h in range(g * self.G, (g + 1) * self.G):
                x = {}
                for i, key in self.keys[l][g].items():
                    if i >= self.decoder.oldest(l, t):
                        x[i] = float(q[h] @ key) * self.decoder.scale(l) + float(self.decoder.slope(h)) * (i - t)
                cap = self.decoder.softcap(l)
                x = x if cap is None else {i: cap * math.tanh(value / cap) for i, value in x.items()}
                sink = None if self.decoder.sink(l, h) is None else float(self.decoder.sink(l, h))
                found.append((softmax(x, sink), softmax({i: value for i, value in x.items() if i in stays}, sink)))
        return found

    def held(self) -> list[list[list[int]]]:
        return [[sorted(head) for head in layer] for layer in self.keys]


def settings(policy: str, given: dict[str, Any], wrap: Sequence[str] = ()) -> dict[str, Any]:
    """The policy's options with the caller's over them; an option that the policy does not know is an error. `wrap` is
    put around the policy; what it has around it already stays one."""
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r}: the oracle knows {sorted(POLICIES)}")
    if set(wrap) - set(WRAPS):
        raise ValueError(f"wrap={wrap!r}: any of {sorted(WRAPS)}")
    options = {**EVERY_POLICY, **POLICIES[policy]}
    options["wrap"] = tuple(name for name in WRAPS if name in {*options["wrap"], *wrap})
    for name in options["wrap"]:
        own = POLICIES[policy]  # whose options stay, but for the schedule
        options |= {key: value for key, value in WRAPS[name].items() if key == "schedule" or key not in own}
    unknown = set(given) - (set(options) - {"score", "wrap"})
    if unknown:
        raise ValueError(f"{policy} has no option {sorted(unknown)}")
    allowed = ("prompt",) if options["score"] in AT_THE_END else ("prompt", "decode", "both")
    allowed = ("decode",) if options["score"] in LATER else allowed
    allowed = ("both", "decode") if options["score"] in RECENT else allowed
    if given.get("schedule", allowed[0]) not in allowed:
        raise ValueError(f"schedule={given['schedule']!r}: {policy} takes {allowed}")
    for name, values in (
        ("scores", ("all", "sampled")),
        ("noise", ("gumbel", "gaussian", "constant", "none")),
        ("heads", ("layer", "each")),
        ("pooling", ("max", "avg", None)),
        ("norm", (1, 2)),
        ("positions", ("original", "renumbered")),
        ("bits", (16, 8, 4)),
    ):
        if name in given and given[name] not in values:
            raise ValueError(f"{name}={given[name]!r}: one of {values}")
    if given.get("kernel", 1) % 2 == 0:
        raise ValueError(f"kernel={given['kernel']}: an even kernel cannot keep the length")
    if policy == "full":
        given = {name: value for name, value in given.items() if name != "schedule"}
    options |= given
    check(options)
    return options


def check(o: dict[str, Any]) -> None:
    """Numbers out of range, and parts that do not go together."""
    for name, low, high in (("floor", 0, 1), ("alpha", 0, 1), ("beta", 1, math.inf), ("eps", 0, math.inf)):
        if name in o and not (low <= o[name] <= high and math.isfinite(o[name])):
            raise ValueError(f"{name}={o[name]}: a number from {low} to {high}")
    if o["block"] is not None and not (isinstance(o["block"], int) and o["block"] >= 1):
        raise ValueError(f"block={o['block']}: an int of at least 1")
    if o["every"] < 1 or (o["every"] > 1 and o["schedule"] in ("prompt", "never")):
        raise ValueError(f"every={o['every']}: an int of at least 1, and only where decoding evicts")
    if o["schedule"] == "decode" and o["block"] is not None:
        raise ValueError("schedule='decode' keeps the prompt whole: block has nothing to evict")
    if o["schedule"] == "decode" and {"adaptive", "global_topk"} & set(o["wrap"]):
        raise ValueError("schedule='decode': budgets of heads are found when a prompt ends")
    if o["schedule"] == "decode" and o["quota"] is not None:
        raise ValueError("schedule='decode' keeps the prompt whole, spans and all")
    if "global_topk" in o["wrap"] and o["block"] is not None:
        raise ValueError("block: a layer reads all blocks before the next one runs")
    if "chunked" in o["wrap"] and (o["schedule"] != "prompt" or "critical" in o["wrap"]):
        raise ValueError("chunks of a prompt are kept where it ends, and by no other selection")
    if "critical" in o["wrap"] and o["score"] in NO_WEIGHTS:
        raise ValueError(f"the score {o['score']} is no weight: times a norm it would mean nothing")


def check_turns(turns: str, schedule: str, count: int) -> None:
    """ "each" and "first" are about the prompts alone; with schedule "decode" no later prompt has a meaning."""
    if turns not in ("all", "each", "first"):
        raise ValueError(f"turns={turns!r}: one of all, each, first")
    if turns != "all" and schedule not in ("prompt", "never"):
        raise ValueError(f"turns={turns!r} goes with schedule 'prompt', not {schedule!r}")
    if count == 0:
        raise ValueError("a text has at least one turn")
    if count > 1 and schedule == "decode":
        raise ValueError("schedule='decode' takes one turn")


def run(model: nn.Module | Decoder, prompt: list[int], continuation: list[int], *, policy: str, k: Any, **options: Any) -> Run:
    """One turn; everything else as in run_turns."""
    return run_turns(model, [(prompt, continuation)], policy=policy, k=k, **options)


def run_turns(
    model: nn.Module | Decoder,
    text: Sequence[tuple[list[int], list[int]]],
    *,
    policy: str,
    k: float | Sequence[float],
    wrap: Sequence[str] = (),
    turns: str = "all",
    generation_length: int | None = None,
    draw: Draw | None = None,
    grad: bool = False,
    **options: Any,
) -> Run:
    """One row under a policy: turns of (prompt, continuation) that are one text, each continuation being fed token by
    token whatever the logits say.

    wrap: any of "pyramid", "adaptive", "critical", put around the policy.
    turns: what later prompts do. "all": the budget is of all tokens so far; "each": of the turn's own prompt, what was
    held before is kept beside it; "first": they evict nothing.
    protect: a mask over the first prompt, or over the whole text, of which only the tokens of prompts count.
    quota: the number of its span for each token of the first prompt, -1 for none.
    generation_length is T, the number of new tokens that tau is spread over: generate()'s own or the policy's option.
    draw(kind, layer, head, t, i) gives the numbers: "uniform" in (0, 1) for KV head `head` and held token i, the newest
    being t; "gumbel" or "gaussian", as zeta itself, for query head `head`, with t = -1 where one draw serves all t.
    grad: run the model itself, not a copy, and keep the graph. What is evicted is decided on plain numbers; gradients go
    through every row of attention, to keys and values that are evicted later too.
    """
    chosen = settings(policy, options, wrap)
    check_turns(turns, chosen["schedule"], len(text))
    random = ("random", "leverage", "compactor", "sampled")
    needs_draw = chosen["score"] in random or chosen.get("noise") in ("gumbel", "gaussian")
    if needs_draw and draw is None:
        raise ValueError(f"{policy} needs draw=")
    first, whole = len(text[0][0]), sum(len(prompt) + len(continuation) for prompt, continuation in text)
    if len(chosen["protect"] or []) not in (0, first, whole):
        raise ValueError(f"protect has {len(chosen['protect'])} entries for a prompt of {first}")
    T = 256 if generation_length is None else generation_length
    logits, kept = [], []
    with torch.set_grad_enabled(grad):
        oracle = Oracle(decoder_of(model, grad), first, k, chosen, T, draw, turns)
        for turn, (prompt, continuation) in enumerate(text):
            if turn > 0:
                oracle.begin(len(prompt))
            block = chosen["block"] or len(prompt)
            for start in range(0, len(prompt), block):
                logits.append(oracle.forward(prompt[start : start + block]))
            kept.append(oracle.held())
            for step, token in enumerate(continuation, 1):
                oracle.step = step
                logits.append(oracle.forward([token]))
                kept.append(oracle.held())
    return Run(torch.cat(logits), kept, oracle.margin)
