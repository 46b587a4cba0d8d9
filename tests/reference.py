"""The oracle: policies.md computed literally, in float64, one row at a time, over explicit lists of tokens.

It shares no code with the library. Nothing is incremental that can be computed from its definition: every query row is
remembered, and a score is summed over the remembered rows at each decision. Symbols are those of policies.md:

    t, i   the query's and the key's token, as original positions      n   tokens of the prompt
    x, a   logits and probabilities of row t, by key i                 s   the scores of one KV head, by key i
    r      the size of a protected set                                 b   the budget of one layer
    l, g, h   layer, KV head, query head; query head h belongs to KV head h // G

A moment is a time at which a layer evicts: moment 0 after the prompt, moment j after decode step j.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from reference_models import Decoder, decoder_of
from torch import Tensor, nn

Draw = Callable[[str, int, int, int, int], float]  # (kind, layer, head, t, i) -> the number drawn

EPSILON = 1e-6  # a share of 0.29 of 100 tokens is 29, though 0.29 * 100 is 28.999...
EULER = 0.5772  # the mean of a standard Gumbel variable, as policies.md writes it
FAR = 2.0**40  # beyond any position; position - FAR is exact in float64

# One line per policy: its score, then its options and their defaults. `recent` is the window that is never evicted.
POLICIES: dict[str, dict[str, Any]] = {
    "full": {"score": "none", "schedule": "never"},
    "random": {"score": "random"},
    "window": {"score": "recency"},
    "dilated_window": {"score": "lattice", "dilation": 1},
    "streaming_llm": {"score": "recency", "sinks": 4},
    "key_attention": {"score": "accumulated"},
    "h2o": {"score": "accumulated", "recent": 0.5},
    "scissorhands": {"score": "quantized", "recent": 0.5},
    "tova": {"score": "last", "heads": "layer"},
    "roco": {"score": "mean", "recent": 10, "protected": 0.5},
    "keyformer": {
        "score": "gumbel",
        "recent": 0.3,
        "noise": "gumbel",
        "resample": False,
        "tau": (1.0, 2.0),
        "shared": False,
        "damping": 1.0,
    },
    "snapkv": {"score": "observation", "schedule": "prompt", "window": 32, "kernel": 7, "pooling": "max"},
    "key_norm": {"score": "key_norm"},
}
EVERY_POLICY: dict[str, Any] = {"sinks": 0, "recent": 0, "protect": None, "schedule": "both"}


@dataclass
class Run:
    """What one row gives: logits [n + len(continuation), V], kept[moment][l][g] as sorted original positions, and the
    smallest gap at any decision: a run whose margin is below a rounding error may rightly differ from another."""

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


# Scores: s[i] from the rows of one KV head. A row that could not see i (causality, a sliding window) has no entry i.


def observed(rows: Sequence[Row], i: int) -> list[float]:
    """a[t, i], averaged over the group, of every row that could see i; its own row is one of them."""
    return [row.group[i] for row in rows if i in row.group]


def accumulated(rows: Sequence[Row], i: int) -> float:
    """AAS: s[i] = sum over t of a[t, i]."""
    return sum(observed(rows, i))


def mean(rows: Sequence[Row], i: int) -> float:
    """MAS: s[i] = sum over t of a[t, i] / c[i]."""
    return sum(observed(rows, i)) / len(observed(rows, i))


def deviation(rows: Sequence[Row], i: int) -> float:
    """sqrt(max(0, sum a^2 / c - (sum a / c)^2)); the square is of the averaged probability."""
    a = observed(rows, i)
    first, second = sum(a) / len(a), sum(value * value for value in a) / len(a)
    return math.sqrt(max(0.0, second - first * first))  # not first ** 2: one row must give 0 to the last bit


def last(rows: Sequence[Row], i: int) -> float:
    """LTAS: s[i] = a[T, i], T the newest row; 0 if T could not see i."""
    return rows[-1].group.get(i, 0.0)


def quantized(rows: Sequence[Row], i: int) -> tuple[float, float]:
    """AQAS: s[i] = sum over t of 1[a[t, i] > 1/m], m the keys t attends to, per query head and then averaged.

    -> s[i] and the smallest |a * m - 1| met. The indicators are counted as integers and divided once, so that equal
    counts are equal scores. a = 1/m to the last bit (a row that sees one key) is no near-tie.
    """
    count, group, closest = 0, 1, math.inf
    for row in rows:
        if i in row.a:
            m, group = len(row.a), len(row.a[i])
            count += sum(a * m > 1.0 for a in row.a[i])
            closest = min([closest, *(abs(a * m - 1.0) for a in row.a[i] if a * m != 1.0)])
    return count / group, closest


def observation(rows: Sequence[Row], n: int, w: int, kernel: int, pooling: str | None) -> dict[int, float]:
    """SnapKV: the mean of a[t, i] over the last w prompt rows, for i < n - w, then pooled among those i."""
    if w == 0:
        return dict.fromkeys(range(n), 0.0)
    window_rows = [row for row in rows if n - w <= row.t < n]
    s = [sum(row.group.get(i, 0.0) for row in window_rows) / w for i in range(n - w)]
    half = kernel // 2
    near = [s[max(0, i - half) : i + half + 1] for i in range(n - w)]
    if pooling == "max":
        s = [max(values) for values in near]
    elif pooling == "avg":  # the zeros beyond either end count
        s = [sum(values) / kernel for values in near]
    return dict(enumerate(s))


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


# Choosing


def tokens(size: float, b: int) -> int:
    """A protected size in tokens: an int is tokens, a float a share of the budget."""
    return math.floor(size * b + EPSILON) if isinstance(size, float) else size


def budget(k: float, n: int) -> int | None:
    """What k means for a prompt of n tokens; None: never evict."""
    if isinstance(k, float):
        if not 0.0 < k <= 1.0:
            raise ValueError(f"k={k}: a float lies in (0, 1]")
        return None if k == 1.0 else max(1, math.floor(k * n + EPSILON))
    if k < 1:
        raise ValueError(f"k={k}: an int is at least 1")
    return k


def worst(s: dict[int, float], count: int, dead: Callable[[int], bool] = lambda i: False) -> tuple[set[int], float]:
    """The `count` tokens to evict of the candidates in s, and the margin of that choice.

    Dead tokens go first; then the lowest score; of equal scores, the lower position. The margin is the gap between the
    last one to go and the first to stay. Where these two are exactly equal the rule on ties decides, and what a small
    error could change is their order with the nearest different score. Between dead and live there is no gap to close.
    """
    order = sorted(s, key=lambda i: (not dead(i), s[i], i))
    if not 0 < count < len(order):
        return set(order[: max(count, 0)]), math.inf
    gone, stays = order[count - 1], order[count]
    if dead(gone) != dead(stays):
        return set(order[:count]), math.inf
    if s[gone] != s[stays]:
        return set(order[:count]), s[stays] - s[gone]
    gaps = [abs(s[i] - s[gone]) for i in order if dead(i) == dead(gone) and s[i] != s[gone]]
    return set(order[:count]), min(gaps, default=math.inf)


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
    ) -> None:
        L, K = decoder.layers, decoder.kv_heads
        self.decoder, self.n, self.options, self.T, self.draw = decoder, n, options, generation_length, draw
        self.H, self.G = decoder.query_heads, decoder.query_heads // K
        per_layer = list(k) if isinstance(k, Sequence) else [k] * L
        if len(per_layer) != L:
            raise ValueError(f"k has {len(per_layer)} entries for {L} layers")
        self.budgets = [budget(value, n) for value in per_layer]
        protect = options["protect"] or []
        if len(protect) not in (0, n):
            raise ValueError(f"protect has {len(protect)} entries for a prompt of {n}")
        self.protect = {i for i, chosen in enumerate(protect) if chosen}
        if options["schedule"] in ("prompt", "both"):
            for b in self.budgets:
                if b is not None and len(self.protect) > b:
                    raise ValueError(f"protect keeps {len(self.protect)} tokens, the budget is {b}")
        self.step = 0  # 0: the prompt; j: decode step j
        self.margin = math.inf
        self.keys: list[list[dict[int, Tensor]]] = [[{} for _ in range(K)] for _ in range(L)]
        self.values: list[list[dict[int, Tensor]]] = [[{} for _ in range(K)] for _ in range(L)]
        self.rows: list[list[list[Row]]] = [[[] for _ in range(K)] for _ in range(L)]
        # Keyformer's running scores; with shared=True every layer adds to, and decides by, the same ones.
        running: list[list[dict[int, float]]] = [[{} for _ in range(K)] for _ in range(L)]
        self.running = [running[0]] * L if options.get("shared") else running
        self.zeta: dict[tuple[int, int, int], float] = {}

    @property
    def newest(self) -> int:
        return self.n - 1 + self.step

    # Forward

    def forward(self, ids: Sequence[int]) -> Tensor:
        """The prompt, or the one token of a decode step -> logits [T, V]. A layer evicts before the next one runs."""
        positions = torch.arange(self.newest + 1 - len(ids), self.newest + 1)
        x_TE = self.decoder.embed(torch.tensor(ids), positions)
        for l in range(self.decoder.layers):
            x_TE = self.decoder.block(l, x_TE, partial(self.attend, l, positions))
            self.add_running(l, len(ids))
            self.evict(l)
        return self.decoder.logits(x_TE)

    def attend(self, l: int, positions: Tensor, h_TE: Tensor) -> Tensor:
        """Each new token is written, then attends to itself and to what its KV head holds and its window reaches."""
        q, k, v = self.decoder.project(l, h_TE, positions)
        y = torch.zeros_like(q)
        scale, window = self.decoder.scale(l), self.decoder.window
        for g in range(self.decoder.kv_heads):
            heads = range(g * self.G, (g + 1) * self.G)
            for index, t in enumerate(positions.tolist()):
                self.keys[l][g][t], self.values[l][g][t] = k[g, index], v[g, index]  # what is newer is not there yet
                seen = [i for i in sorted(self.keys[l][g]) if window is None or t - i < window]
                keys = torch.stack([self.keys[l][g][i] for i in seen])
                values = torch.stack([self.values[l][g][i] for i in seen])
                distance = torch.tensor([i - t for i in seen], dtype=torch.float64)
                x = torch.stack([keys @ q[h, index] * scale + self.decoder.slope(h) * distance for h in heads])
                a = torch.softmax(x, -1)
                for j, h in enumerate(heads):
                    y[h, index] = a[j] @ values
                x_of, a_of = (dict(zip(seen, matrix.T.tolist(), strict=True)) for matrix in (x, a))
                self.rows[l][g].append(Row(t, x_of, a_of))
        return self.decoder.output(l, y.transpose(0, 1).flatten(1))

    # Keyformer's running score

    def tau(self) -> float:
        """tau_init for prompt rows; at decode step t it has gone t/T of the way to tau_end."""
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
        """s[i] <- damping * s[i] + the sum of f[t, i] over the `new` last rows: the whole prompt is one addition, so is
        each step. With shared scores a layer adds to, and damps, the tokens that it holds itself."""
        if self.options["score"] != "gumbel":
            return
        for g in range(self.decoder.kv_heads):
            s = self.running[l][g]
            for i in self.keys[l][g]:
                s[i] = self.options["damping"] * s.get(i, 0.0)
            for row in self.rows[l][g][-new:]:
                for i, f in gumbel_softmax(row, partial(self.noise, l, g, row.t), self.tau()).items():
                    s[i] += f

    # Eviction

    def sizes(self, b: int) -> tuple[set[int], int, int, int]:
        """The fixed tokens (sinks and protect), then recent', RoCo's r' and the observation window w', clamped so that
        together they fit the budget. With schedule "decode" the prompt is fixed and is not counted in b."""
        o = self.options
        if o["schedule"] == "decode":
            fixed, room = set(range(self.n)), b
        else:
            sinks = min(tokens(o["sinks"], b), b)
            while len(set(range(sinks)) | self.protect) > b:
                sinks -= 1
            fixed = set(range(sinks)) | self.protect
            room = b - len(fixed)
        recent = min(tokens(o["recent"], b), room)
        r = min(tokens(o.get("protected", 0), b), room - recent)
        w = min(tokens(o.get("window", 0), b), room)
        return fixed, recent, r, w

    def evictable(self, l: int, g: int, b: int) -> list[int]:
        """The scope: outside the fixed tokens, the newest, and RoCo's top r' by standard deviation."""
        fixed, recent, r, w = self.sizes(b)
        held = sorted(self.keys[l][g])
        newest = set(held[len(held) - max(recent, w) :])
        top: set[int] = set()
        if r > 0:
            ranked = [i for i in held if i >= self.n] if self.options["schedule"] == "decode" else held
            std = {i: deviation(self.rows[l][g], i) for i in ranked}
            rest, margin = worst(std, len(std) - r)
            self.margin = min(self.margin, margin)
            top = set(ranked) - rest
        return [i for i in held if i not in fixed | newest | top]

    def scores(self, l: int, g: int, b: int, candidates: list[int]) -> dict[int, float]:
        """s[i] of every candidate."""
        o, rows = self.options, self.rows[l][g]
        match o["score"]:
            case "random":
                assert self.draw is not None
                u = {i: self.draw("uniform", l, g, self.newest, i) for i in sorted(self.keys[l][g])}
                return {i: u[i] for i in candidates}
            case "recency":
                return {i: float(i) for i in candidates}
            case "lattice":
                return {i: lattice(i, o["dilation"]) for i in candidates}
            case "accumulated":
                return {i: accumulated(rows, i) for i in candidates}
            case "quantized":
                counts = {i: quantized(rows, i) for i in candidates}
                self.margin = min([self.margin, *(closest for _, closest in counts.values())])
                return {i: count for i, (count, _) in counts.items()}
            case "mean":
                return {i: mean(rows, i) for i in candidates}
            case "last" if o["heads"] == "layer":  # all heads of the layer have one score, hence hold one set of tokens
                newest_rows = [head[-1] for head in self.rows[l]]
                return {i: sum(sum(row.a.get(i, [0.0])) for row in newest_rows) / self.H for i in candidates}
            case "last":
                return {i: last(rows, i) for i in candidates}
            case "gumbel":
                return {i: self.running[l][g][i] for i in candidates}
            case "observation":
                pooled = observation(rows, self.n, self.sizes(b)[3], o["kernel"], o["pooling"])
                return {i: pooled[i] for i in candidates}
            case "key_norm":
                return {i: -math.sqrt((self.keys[l][g][i] ** 2).sum().item()) for i in candidates}
        raise ValueError(o["score"])

    def dead(self, i: int) -> bool:
        """No query from the next one on can see i: it has left the sliding window for good."""
        window = self.decoder.window
        return window is not None and self.newest + 1 - i >= window

    def evict(self, l: int) -> None:
        """Evict layer l's heads back to the budget, if this is a moment at which the schedule evicts."""
        o, b = self.options, self.budgets[l]
        due = o["schedule"] == "both" or (o["schedule"] == ("decode" if self.step else "prompt"))
        if b is None or not due:
            return
        limit = b + self.n if o["schedule"] == "decode" else b
        for g in range(self.decoder.kv_heads):
            excess = len(self.keys[l][g]) - limit
            if excess <= 0:
                continue
            victims, margin = worst(self.scores(l, g, b, self.evictable(l, g, b)), excess, self.dead)
            self.margin = min(self.margin, margin)
            for i in victims:
                del self.keys[l][g][i], self.values[l][g][i]

    def held(self) -> list[list[list[int]]]:
        return [[sorted(head) for head in layer] for layer in self.keys]


def settings(policy: str, given: dict[str, Any]) -> dict[str, Any]:
    """The policy's options with the caller's over them; an option that the policy does not know is an error."""
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r}: the oracle knows {sorted(POLICIES)}")
    options = {**EVERY_POLICY, **POLICIES[policy]}
    unknown = set(given) - (set(options) - {"score"})
    if unknown:
        raise ValueError(f"{policy} has no option {sorted(unknown)}")
    allowed = ("prompt",) if policy == "snapkv" else ("prompt", "decode", "both")
    if given.get("schedule", allowed[0]) not in allowed:
        raise ValueError(f"schedule={given['schedule']!r}: {policy} takes {allowed}")
    for name, values in (
        ("noise", ("gumbel", "gaussian", "constant", "none")),
        ("heads", ("layer", "each")),
        ("pooling", ("max", "avg", None)),
    ):
        if name in given and given[name] not in values:
            raise ValueError(f"{name}={given[name]!r}: one of {values}")
    if given.get("kernel", 1) % 2 == 0:
        raise ValueError(f"kernel={given['kernel']}: an even kernel cannot keep the length")
    if policy == "full":
        given = {name: value for name, value in given.items() if name != "schedule"}
    return {**options, **given}


@torch.no_grad()
def run(
    model: nn.Module | Decoder,
    prompt: list[int],
    continuation: list[int],
    *,
    policy: str,
    k: float | Sequence[float],
    generation_length: int | None = None,
    draw: Draw | None = None,
    **options: Any,
) -> Run:
    """One row under a policy, the continuation being fed token by token whatever the logits say.

    generation_length is T, the number of new tokens that tau is spread over: generate()'s own or the policy's option.
    draw(kind, layer, head, t, i) gives the numbers: "uniform" in (0, 1) for KV head `head` and held token i, the newest
    being t; "gumbel" or "gaussian", as zeta itself, for query head `head`, with t = -1 where one draw serves all t.
    """
    chosen = settings(policy, options)
    needs_draw = chosen["score"] == "random" or chosen.get("noise") in ("gumbel", "gaussian")
    if needs_draw and draw is None:
        raise ValueError(f"{policy} needs draw=")
    T = 256 if generation_length is None else generation_length
    oracle = Oracle(decoder_of(model), len(prompt), k, chosen, T, draw)
    logits, kept = [oracle.forward(prompt)], [oracle.held()]
    for step, token in enumerate(continuation, 1):
        oracle.step = step
        logits.append(oracle.forward([token]))
        kept.append(oracle.held())
    return Run(torch.cat(logits), kept, oracle.margin)
