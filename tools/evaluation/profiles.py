"""Tuned profiles beside every policy with one k for all layers, at equal bytes, on text that they were not tuned on.

`python -m tools.evaluation.profiles` prints the table of docs/guides/memory.md, and each comparison on standard error: some
minutes on one core. With names of texts it measures those alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import kvpatch
from kvpatch.cli.loading import MODELS, load_model, load_tokenizer
from kvpatch.cli.needles import task_needles
from kvpatch.evaluation.divergence import Comparison, Figures
from kvpatch.evaluation.tune import Pieces, Search, cut, tune
from tools.docs_tables import markdown
from tools.evaluation.stats import Bootstrap, Estimate
from tools.training.text import python_sources, text_stream

TRIED = "streaming_llm,h2o,roco,tova,snapkv,adakv,critical_adakv,layer_defensive"
"""Policies that the searches of the table try. None of them is meant for questions that come later."""
MORE = "key_diff,leverage,compactor,kvzip"
"""Policies for questions that come later; `kvpatch tune` tries the first three by default."""
HEADS = ("text", "profile", "bytes", "KL", "best fixed, its KL", "fixed - profile", "worse, alike, better")
TOLERANCE = 0.05
STEPS = 80
"""Shares k of the prompt that a fixed budget is chosen from: 1/STEPS, 2/STEPS, ..."""
WINDOW = 8
"""Rows of a smaller observation window, with which policies are measured too: their own fill small budgets of short prompts."""


def fixed() -> dict[str, kvpatch.Policy]:
    """Return every policy that needs no calibration, and those with an observation window again with a smaller one."""
    plain = {name: kvpatch.get_policy(name) for name in kvpatch.list_policies() if name != "full"}
    plain = {name: policy for name, policy in plain.items() if not policy.score.calibrated}
    wide = {name: policy for name, policy in plain.items() if policy.score.protects_window}
    wide = {name: policy for name, policy in wide.items() if policy.options().get("window", 0) > WINDOW}
    return plain | {f"{name} window={WINDOW}": policy.with_options(window=WINDOW) for name, policy in wide.items()}


@dataclass(frozen=True)
class Reading:
    """A model, pieces of text to tune on, others to measure on, and the policies that the search tries."""

    model: Any
    own: Pieces
    others: Pieces
    tried: str = TRIED


@dataclass(frozen=True)
class Beside:
    """A fixed policy at the bytes of a profile: k, share of the full cache's bytes, KL, and its own minus the profile's."""

    name: str
    k: float
    share: float
    kl: float
    more: Estimate

    def __str__(self) -> str:
        return f"{self.name} k={self.k:g}: {self.share:.3f} of the bytes, KL {self.kl:.4f}, more by {self.more}"


def source(tuned: int = 3, measured: int = 10) -> Reading:
    """Return llama-python and the library files that it was not trained on: pieces of <bos>, 191 tokens, and 48 more."""
    name = str(MODELS / "llama-python")
    tokenizer = load_tokenizer(name)
    ids_1T = text_stream(tokenizer, python_sources(held_out=True))[None]
    half = ids_1T.shape[1] // 2  # other files
    first = [tokenizer.bos_token_id]
    own, others = cut(ids_1T[:, :half], 192, 48, tuned, first), cut(ids_1T[:, half:], 192, 48, measured, first)
    return Reading(load_model(name, "float32"), own, others)


def questions(in_prompt: bool = True, tried: str = TRIED, tuned: int = 8) -> Reading:
    """Return llama-0 and its prompts with a question."""
    text = task_needles(in_prompt)
    pieces = [(ids_1T[None], text.n) for ids_1T in text.ids_BT]
    return Reading(load_model(str(MODELS / "llama-0"), "float32"), pieces[:tuned], pieces[tuned:], tried)


READINGS: dict[str, Callable[[], Reading]] = {
    "source": source,
    "questions": questions,
    "later": lambda: questions(in_prompt=False),
    "later, more tried": lambda: questions(in_prompt=False, tried=f"{TRIED},{MORE}"),
}


def beside(
    comparisons: Sequence[Comparison], profile: Sequence[Figures], policies: dict[str, kvpatch.Policy], draws: Bootstrap
) -> Iterator[Beside]:
    """Yield every policy that can hold as few bytes as a profile did, with the least k that holds no fewer."""
    full, wanted = comparisons[0], profile[0].nbytes
    for name, policy in policies.items():
        low, high = 1, STEPS
        if full.figures(policy, 1 / STEPS).nbytes > wanted:
            continue
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if full.figures(policy, middle / STEPS).nbytes >= wanted else (middle + 1, high)
        figures = [one.figures(policy, low / STEPS) for one in comparisons]
        more = np.array([one.kl for one in figures]) - np.array([one.kl for one in profile])
        yield Beside(name, low / STEPS, _share(figures, comparisons), _mean(figures), draws.estimate(more))


def _share(figures: Sequence[Figures], comparisons: Sequence[Comparison]) -> float:
    return float(np.mean([one.nbytes / full.nbytes for one, full in zip(figures, comparisons, strict=True)]))


def _mean(figures: Sequence[Figures]) -> float:
    return float(np.mean([one.kl for one in figures]))


def row(name: str, reading: Reading) -> tuple[str, ...]:
    """Tune, measure the profile and every fixed policy on the other pieces, and return the table's row."""
    tried = {one: kvpatch.get_policy(one) for one in reading.tried.split(",")}
    profile = tune(Search(reading.model, reading.own, TOLERANCE), tried)
    options = "".join(f", {key}={value}" for key, value in profile.options.items())
    k = f"{profile.k:g}" if isinstance(profile.k, float) else ", ".join(f"{one:g}" for one in profile.k)
    print(f"{name}: {profile}", file=sys.stderr, flush=True)
    comparisons = [Comparison(reading.model, ids, n) for ids, n in reading.others]
    policy = kvpatch.get_policy(profile.policy).with_options(**profile.options)
    own = [one.figures(policy, profile.k) for one in comparisons]
    draws = Bootstrap([(name, name)] * len(comparisons))
    found = []
    for one in beside(comparisons, own, fixed(), draws):
        print(f"{name}: {one}", file=sys.stderr, flush=True)
        found.append(one)
    best = min(found, key=lambda one: one.kl)
    signs = [int(np.sign(one.more.low)) if one.more.low > 0 or one.more.high < 0 else 0 for one in found]
    counts = signs.count(1), signs.count(0), signs.count(-1)
    shown = f"`{profile.policy}`{options}; k = {k}"
    theirs = f"`{best.name}`, {best.kl:.3f}"
    cells = f"{_share(own, comparisons):.0%}", f"{_mean(own):.3f}", theirs, str(best.more), ", ".join(map(str, counts))
    return (name, shown, *cells)


if __name__ == "__main__":
    torch.set_num_threads(1)
    chosen = sys.argv[1:] or list(READINGS)
    print(markdown(HEADS, [row(name, READINGS[name]()) for name in chosen]))
