"""What a cache should hold and answer: one oracle per row, which goes wherever its row goes."""

import copy
import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

import kvpatch
from kvpatch.policies.budgets import Rule
from tests.helpers.comparing import (
    ANY_SCHEDULE,
    CALIBRATED,
    DECODING,
    EVICTING,
    MARGIN,
    PLACED,
    SMALL,
    SMALL_STEPS,
    TOLERANCE,
    WAITING,
    WINDOWED,
    calibrated,
    combined,
    draw,
    plain,
    sorted_positions,
)
from tests.helpers.tiny import FIVE, make, snapshot
from tests.oracle.reference import Oracle, settings
from tests.oracle.reference_models import decoder_of
from tests.oracle.test_oracle_parts import fits

LONGEST = 60  # tokens of a row; comparing.table has noise for twice as many
TAU_STEPS = 9  # decode steps over which Keyformer's temperature moves
PLAIN = torch.arange(1, 8)[None]  # a text for the unpatched model


@functools.cache
def subject(name: str) -> tuple[Any, Any, dict[tuple[str, str], Any], torch.Tensor]:
    """A model, its oracle's decoder, its attributes, and what it says while it is not patched."""
    model = make(name, dtype=torch.float64)
    with torch.no_grad():
        said = model(PLAIN, use_cache=False).logits
    return model, decoder_of(model), snapshot(model), said


@dataclass(frozen=True)
class Chosen:
    """The settings of a patch."""

    name: str
    policy: str
    k: Any
    wrap: tuple[str, ...] = ()
    turns: str = "all"
    block: int | None = None
    positions: str = "original"
    bits: int = 16
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def one_turn(self) -> bool:
        return dict(self.options).get("schedule") == "decode"

    def on(self, name: str) -> "Chosen":
        """These settings for another model, where it has what they need: else a table of budgets is 0.4, and a policy h2o."""
        heads, own = subject(name)[1].kv_heads, calibrated(self.policy, name)
        if own is None:
            return Chosen(name, "h2o", 0.4)
        tables = self.k if isinstance(self.k, tuple) else ()
        k = self.k if all(not isinstance(one, tuple) or len(one) == heads for one in tables) else 0.4
        positions = "original" if name == "gpt2" else self.positions
        return replace(self, name=name, positions=positions, k=k, options=tuple((dict(self.options) | own).items()))

    def patched(self, model: Any) -> Any:
        extra = {"generation_length": TAU_STEPS} if self.policy == "keyformer" else {}
        extra |= {} if self.turns == "all" else {"turns": self.turns}
        policy = combined(self.policy, self.wrap)
        extra |= {"bits": self.bits, "block": self.block, "positions": self.positions}
        return kvpatch.patched(model, policy, listed(self.k), **dict(self.options), **extra)

    def oracle(self, n: int) -> Oracle:
        given = {**dict(self.options), "bits": self.bits, "block": self.block, "positions": self.positions}
        chosen = settings(self.policy, given, self.wrap)
        k, drawn = plain(listed(self.k)), functools.partial(draw, 0)
        return Oracle(subject(self.name)[1], n, k, chosen, TAU_STEPS, drawn, self.turns)


def listed(k: Any) -> Any:
    """Budgets of layers and heads as kvpatch takes them; Chosen has tuples."""
    return [listed(one) for one in k] if isinstance(k, tuple) else k


# under which policies heads may hold numbers of their own, and with which protected sizes
SEVERAL = {"h2o": {"recent": 1}, "roco": {"recent": 1, "protected": 2}, "scissorhands": {"recent": 1}, "tova": {}, "snapkv": {}}


def budgets_of_heads(choose: Any, heads: int) -> Any:
    """A table, or a budget that follows the text."""
    size, part = st.one_of(st.integers(1, 12), st.sampled_from((0.3, 0.6, 1.0))), st.sampled_from((0.3, 0.6, 0.9))
    return choose(
        st.one_of(
            st.tuples(*[st.tuples(*[size] * heads)] * 2),
            part.map(kvpatch.Share),
            st.builds(kvpatch.Mass, part, floor=st.integers(1, 3), ceiling=st.sampled_from((None, 9))),
            st.sampled_from((0.02, 0.1)).map(kvpatch.Threshold),
        )
    )


def own_options(choose: Any, name: str, policy: str, wrap: tuple[str, ...], k: Any) -> dict[str, Any]:
    """A schedule that the policy has, and options that suit short texts."""
    if policy in WINDOWED:
        return {"window": choose(st.integers(1, 4)), "kernel": 3}
    if policy in DECODING:
        return {**SMALL_STEPS[policy], "schedule": kvpatch.get_policy(policy).schedule}
    if policy not in (*ANY_SCHEDULE, *CALIBRATED):
        return {}
    schedule = choose(st.sampled_from(("both", "both", "prompt", "decode")))
    divided = kvpatch.get_policy(policy).over_heads is not None
    whole = divided or "adaptive" in wrap or isinstance(k, kvpatch.Share)  # which count the prompt too
    if (schedule == "decode" and whole) or schedule not in kvpatch.get_policy(policy).score.schedules:
        schedule = "both"
    own = SMALL.get(policy, {}) if policy in CALIBRATED else {}
    return {**own, **(calibrated(policy, name) or {}), "schedule": schedule}


@st.composite
def chosen_settings(choose: Any, name: str | None = None) -> Chosen:
    """Any architecture, policy and combination that go together."""
    name = choose(st.sampled_from(FIVE)) if name is None else name
    policy = choose(st.sampled_from((*EVICTING, *DECODING, *CALIBRATED, "full")))
    policy = "q_filter" if calibrated(policy, name) is None else policy
    wrap = tuple(one for one in ("pyramid", "adaptive", "critical") if policy != "full" and choose(st.integers(0, 3)) == 0)
    wrap = wrap if fits(policy, wrap) else tuple(one for one in wrap if one == "pyramid")
    k = choose(st.one_of(st.sampled_from((0.3, 0.5, 0.8)), st.integers(1, 12), st.sampled_from((1.0, (0.4, 3), (1.0, 2)))))
    k = 0.4 if isinstance(k, tuple) and ("pyramid" in wrap or "pyramid" in policy) else k
    options: dict[str, Any] = {}
    if policy in SEVERAL and choose(st.integers(0, 3)) == 0:
        k, wrap = budgets_of_heads(choose, subject(name)[1].kv_heads), ()
        options |= SEVERAL[policy]
    if policy == "duo":
        k, wrap = choose(st.sampled_from((0.3, 0.5, 0.8, 1.0))), ()
    if policy in EVICTING and choose(st.integers(0, 4)) == 0:
        wrap = (*wrap, choose(st.sampled_from(("merged", "refit"))))
    options |= own_options(choose, name, policy, wrap, k)
    options |= {"lag": 3} if policy == "lag_kv" else SMALL[policy] if policy in PLACED else {}
    anew = policy == "tova" and isinstance(k, kvpatch.Mass)  # a row's scores, which add up to nothing over steps
    if "schedule" in options and ({"merged", "refit"} & {*wrap} or anew):
        options["schedule"] = "prompt"
    if policy == "roco" and "protected" not in options:
        options |= {"recent": 1, "protected": 0.3}
    if policy != "full" and choose(st.integers(0, 3)) == 0:
        options["sinks"] = choose(st.integers(1, 2))
    blocks = options.get("schedule") != "decode" and policy not in WAITING and "refit" not in wrap
    block = choose(st.one_of(st.none(), st.integers(1, 5))) if blocks else None
    if policy == "keyformer" and block is None:
        options["shared"] = choose(st.booleans()) and k != (1.0, 2)  # which is refused
    turns = choose(st.sampled_from(("all", "each", "first"))) if once(policy, options) else "all"
    placed = policy in (*PLACED, *CALIBRATED) or "refit" in wrap
    positions = "renumbered" if name != "gpt2" and not placed and choose(st.integers(0, 2)) == 0 else "original"
    bits = choose(st.sampled_from((16, 16, 16, 8, 4)))
    if policy != "full" and not once(policy, options) and not isinstance(k, Rule):
        options["every"] = min(choose(st.sampled_from((1, 1, 2, 3, 5))), min(budgets_in_tokens(k), default=5))
    return Chosen(name, policy, k, wrap, turns, block, positions, bits, tuple(options.items()))


def budgets_in_tokens(k: Any) -> list[int]:
    """The budgets that are no shares."""
    if isinstance(k, tuple):
        return [one for part in k for one in budgets_in_tokens(part)]
    return [k] if isinstance(k, int) else []


def once(policy: str, options: dict[str, Any]) -> bool:
    """Whether only prompts are evicted from."""
    return (policy in EVICTING and policy not in ANY_SCHEDULE) or options.get("schedule") == "prompt"


def fork(thing: Any, memo: dict[int, Any] | None = None) -> Any:
    """A copy of an oracle that shares what never changes: tensors, rows, the model. What it holds twice stays one."""
    memo = {} if memo is None else memo
    if isinstance(thing, Oracle):
        new = copy.copy(thing)
        for name, value in vars(thing).items():
            setattr(new, name, fork(value, memo))
        return new
    if not isinstance(thing, dict | list | set):
        return thing
    if id(thing) not in memo:
        values = thing.values() if isinstance(thing, dict) else thing
        if not any(isinstance(value, dict | list | set) for value in values):
            memo[id(thing)] = thing.copy()
        elif isinstance(thing, dict):
            memo[id(thing)] = {key: fork(value, memo) for key, value in thing.items()}
        else:
            memo[id(thing)] = [fork(value, memo) for value in thing]
    return memo[id(thing)]


def shortened(oracle: Oracle, count: int) -> Oracle:
    """Without the last tokens, of a text that nothing was evicted from and whose rows no score remembers."""
    oracle.seen -= count
    for l, layer in enumerate(oracle.keys):
        for g in range(len(layer)):
            oracle.rounded[l][g] = {i for i in oracle.rounded[l][g] if i < oracle.seen}
            noted = oracle.noted[l][g], oracle.repeated[l][g], oracle.local[l][g]
            for held in (oracle.keys[l][g], oracle.values[l][g], *noted):
                for gone in [i for i in held if i >= oracle.seen]:
                    del held[gone]
            oracle.rows[l][g] = [row for row in oracle.rows[l][g] if row.t < oracle.seen]
    return oracle


class Shadow:
    """The rows of one cache. history: the rows before each decode step since the last prompt; recorded: how many of these
    steps the cache must be able to take back; columns: what get_seq_length counts."""

    def __init__(self, chosen: Chosen) -> None:
        self.chosen, self.oracles, self.texts = chosen, [], []
        self.columns = self.recorded = 0
        self.joined = self.padded = self.recording = False
        self.history: list[list[Oracle]] = []

    def fork(self) -> "Shadow":
        new = copy.copy(self)
        new.oracles, new.texts = [fork(one) for one in self.oracles], [list(text) for text in self.texts]
        new.history = list(self.history)  # what lies there is only ever forked
        return new

    @property
    def lossless(self) -> bool:
        """Nothing was evicted yet."""
        return all(len(head) == oracle.seen for oracle in self.oracles for layer in oracle.keys for head in layer)

    @property
    def longest(self) -> int:
        return max([oracle.seen for oracle in self.oracles], default=0)

    def read(self, rows: list[list[list[int]]], columns: int) -> list[torch.Tensor]:
        """A prompt in pieces, of each row -> logits [tokens, V] of each."""
        fresh, logits = not self.oracles, []
        for row, pieces in enumerate(rows):
            ids = [token for piece in pieces for token in piece]
            if fresh:
                self.oracles.append(self.chosen.oracle(len(ids)))
                self.texts.append([])
            else:
                self.oracles[row].begin(len(ids))
            self.texts[row] += ids
            block = self.chosen.block
            cuts = [ids] if block is None else [p[start : start + block] for p in pieces for start in range(0, len(p), block)]
            logits.append(torch.cat([self.oracles[row].forward(cut) for cut in cuts]))
        self.columns, self.history, self.recorded = self.columns + columns, [], 0
        return logits

    def begin_pass(self) -> None:
        """What an earlier pass recorded goes where recording was not asked for."""
        self.recorded = self.recorded if self.recording else 0

    def step(self, ids: list[int], together: bool = False) -> torch.Tensor:
        """One token per row -> logits [B,V], after begin_pass(). together: with others in one pass, which is recorded whether
        asked or not."""
        self.history.append([fork(one) for one in self.oracles])
        logits = []
        for oracle, text, token in zip(self.oracles, self.texts, ids, strict=True):
            oracle.step += 1
            logits.append(oracle.forward([token])[-1])
            text.append(token)
        self.columns += 1
        self.recorded = self.recorded + 1 if self.recording or together else 0
        return torch.stack(logits)

    def cropped(self, count: int) -> "Shadow":
        """As it was `count` decode steps ago; of a cache that has evicted nothing, any tokens ago."""
        new = copy.copy(self)
        new.texts = [text[: len(text) - count] for text in self.texts]
        if count <= len(self.history):
            new.oracles = [fork(one) for one in self.history[-count]]
        else:
            new.oracles = [shortened(fork(one), count) for one in self.oracles]
        new.history, new.columns = self.history[: max(len(self.history) - count, 0)], self.columns - count
        new.recorded = max(self.recorded - count, 0)
        return new

    def select(self, rows: list[int]) -> None:
        self.oracles, self.texts = [fork(self.oracles[row]) for row in rows], [list(self.texts[row]) for row in rows]
        self.history, self.recorded = [[past[row] for row in rows] for past in self.history], 0
        if self.joined:
            self.columns = self.longest

    def close(self, row: int) -> bool:
        """Whether a decision of this row was too close to call."""
        return self.oracles[row].margin < MARGIN[torch.float64]


def check_cache(cache: Any, shadow: Shadow) -> tuple[int, int]:
    """The invariants of what a cache holds, and that it is what the oracle holds -> rows compared, and too close to call."""
    assert cache.get_seq_length() == shadow.columns, "tokens seen"
    assert cache.next_positions()[:, 0].tolist() == [oracle.seen for oracle in shadow.oracles], "positions to come"
    layers = [cache.positions(layer).tolist() for layer in range(len(cache.layers))]
    counts = [cache.held(layer).tolist() for layer in range(len(cache.layers))]
    compared, skipped = 0, 0
    for row, oracle in enumerate(shadow.oracles):
        held, wanted = sorted_positions([layer[row] for layer in layers]), oracle.held()
        assert [layer[row] for layer in counts] == [[len(head) for head in heads] for heads in held], "held()"
        for l, heads in enumerate(held):
            assert sum(map(len, heads)) == sum(map(len, wanted[l])), f"row {row}, layer {l}: another number of tokens"
            for head in heads:
                assert len(set(head)) == len(head) and all(p < oracle.seen for p in head), "positions unique and real"
                check_budget(shadow.chosen, oracle, l, head)
        if shadow.close(row):
            skipped += 1
        else:
            compared += 1
            assert held == wanted, f"row {row}: kept positions differ"
    kv = cache.layers[0].kv
    width = sum(tensor.element_size() * tensor.shape[-1] for tensor in (kv.keys, kv.values))
    assert cache.nbytes >= width * sum(n for layer in counts for row in layer for n in row), "nbytes"
    return compared, skipped


def check_budget(chosen: Chosen, oracle: Oracle, l: int, head: list[int]) -> None:
    """No head above its budget, and sinks and newest tokens held, where one budget is of all heads and the whole text."""
    b, options = oracle.budgets[l], oracle.options
    if oracle.moving[l] or oracle.tables[l] is not None:
        return
    if b is None or options["schedule"] != "both" or {"adaptive", "global_topk"} & set(options["wrap"]):
        return
    most = b + options["every"] - 1
    assert len(head) <= most, f"{len(head)} tokens held, the budget is {b}"
    fixed, recent, _, _ = oracle.sizes(b)
    newest = range(max(oracle.seen - recent, 0), oracle.seen)
    if oracle.turn == 0:  # a later turn may have other sizes than those that chose what is left
        assert {i for i in fixed if i < oracle.seen} <= set(head) and set(newest) <= set(head), "protected tokens are held"


def check_logits(got: torch.Tensor, want: torch.Tensor, shadow: Shadow, row: int) -> None:
    if not shadow.close(row):
        torch.testing.assert_close(got, want, atol=TOLERANCE[torch.float64], rtol=0, msg=lambda m: f"logits of row {row}: {m}")
