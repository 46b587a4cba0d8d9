"""How far does eviction move attention's output, by head, layer and budget [CriticalKV 4.6, Figures 5 to 7]?

The measures and texts are those of tools/evaluation/perturbation.py: ||o - o^||_1 of one query of one query head, o with
the full cache and o^ with what the policy holds when the query comes, for the queries behind the prompt over the full
cache's hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvpatch import get_policy
from tools.evaluation import perturbation
from tools.training.tasks import Batch

from .observe import Memory, Observing, by_setting, plot, watch
from .rows import alike, rows_of
from .task import FULL, PYTHON, Request, Sample, Setting, Subject, digest

DEEP = 64
"""Layers that are named in the summary."""
TWO_STAGE = ("alpha", "eps", "norm")


@dataclass(frozen=True)
class Moved:
    """One setting on one batch: means over queries by layer, row and query head, what was held, and its next tokens [B,1+Q]."""

    l1_LBN: Tensor
    layer_l1_LB: Tensor
    mass_LBN: Tensor
    held: list[Tensor]
    guess_BS: Tensor


def base_of(setting: Setting) -> Setting | None:
    """The same without two-stage selection; None where there is none, or none by name."""
    name = setting.policy.strip()
    if get_policy(name).selection is None or not name.startswith(("critical_", "critical(")):
        return None
    inner = name.removeprefix("critical_") if name.startswith("critical_") else name[len("critical(") : -1]
    options = {part: value for part, value in setting.options.items() if part not in TWO_STAGE}
    return Setting(inner.strip(), setting.k, options)


def heads_lower(base: Moved, other: Moved) -> list[float | None]:
    """Of each row the share of (layer, query head) in which `other` moves the output less; equal sets are left out."""
    N = base.l1_LBN.shape[-1]
    differ_LBH = torch.stack([(a != b).flatten(2).any(-1) for a, b in zip(base.held, other.held, strict=True)])
    differ = differ_LBH.repeat_interleave(N // differ_LBH.shape[-1], -1)
    won = (other.l1_LBN < base.l1_LBN) & differ
    cases = differ.sum((0, 2)).tolist()
    return [n / all_ if all_ else None for n, all_ in zip(won.sum((0, 2)).tolist(), cases, strict=True)]


class Perturbation(Observing):
    name = "perturbation"
    about = "How far does eviction move attention's output, and in how many heads does two-stage selection move it less?"
    source = "[CriticalKV 4.6, Figures 5 to 7]"
    metric = "l1"
    metrics: ClassVar[dict[str, str]] = {
        "l1": "||o - o^||_1 of a query head, mean over layers, heads and queries",
        "heads_lower": "share of (layer, head) in which l1 is lower than without two-stage selection, equal sets left out",
        "right": "share of right answers, or of right next tokens where nothing is asked",
        "layer_l1": "||o - o^||_1 of a layer's heads together, mean over layers and queries",
        "mass": "share of the full cache's attention that falls on what is held",
        **{f"layer_{i}_l1": f"||o - o^||_1 of the heads of layer {i} together" for i in range(DEEP)},
    }
    better = "lower"
    policies = ("snapkv", "critical_snapkv", "adakv", "critical_adakv")
    budgets = perturbation.BUDGETS
    count = 16
    """Of each scenario."""

    def __init__(self) -> None:
        super().__init__()
        self.bases = Memory()

    def settings(self, request: Request, subject: Subject) -> list[Setting]:
        """As in tools/evaluation/perturbation.py: short prompts get a short observation window, and the kernel stays."""
        short = {"window": perturbation.WINDOW} if subject.synthetic or subject.python else {}
        chosen = [name for name in request.policies or self.policies if name != "full"]
        windowed = {name: short if "window" in get_policy(name).options() else {} for name in chosen}
        return [FULL, *(Setting(name, k, windowed[name]) for k in request.budgets or self.budgets for name in chosen)]

    def samples(self, subject: Subject, request: Request, seed: int) -> list[Sample]:
        """Scenarios one after another; seed 0 has the rows of perturbation.py. length and steps: of --data alone."""
        count = request.count or self.count
        if request.data is not None or not (subject.synthetic or subject.python):
            length = self.option(request, "length")
            rows = rows_of(subject, request, seed, count, length)
            found = {"text": perturbation.Text(rows, length - self.option(request, "steps"))}
        else:
            assert subject.tokenizer is not None
            name = PYTHON if subject.python else subject.name
            found = perturbation.texts(name, subject.tokenizer, count * (seed + 1))
        samples = []
        for scenario, text in found.items():
            answers_AW = text.batch.answers_AW if text.batch else None
            for i, row in enumerate(text.tokens_BT[-count:]):
                data = row[:-1], row, answers_AW
                samples.append(Sample(f"{scenario} {i:03}", text.n, data, {"scenario": scenario}, digest(row)))
        return samples

    def run(
        self, subject: Subject, setting: Setting, samples: list[Sample], request: Request, seed: int
    ) -> Iterator[dict[str, Any]]:
        for chunk in alike(samples, request.batch):
            if setting.policy == "full":
                logits = self.look(subject, chunk, chunk[0].n)[1][:, chunk[0].n - 1 :]
                yield from ({"right": value} for value in right(chunk, logits.argmax(-1).cpu()))
                continue
            moved, base = self._moved(subject, setting, chunk, seed), base_of(setting)
            won = heads_lower(self._moved(subject, base, chunk, seed), moved) if base else [None] * len(chunk)
            lines = zip(_figures(moved), right(chunk, moved.guess_BS), won, strict=True)
            for line, answered, share in lines:
                yield line | {"right": answered} | ({} if share is None else {"heads_lower": share})

    def _moved(self, subject: Subject, setting: Setting, chunk: list[Sample], seed: int) -> Moved:
        key = setting.key, seed, *(sample.digest for sample in chunk)
        return self.bases.get(subject.model, key, lambda: self._measure(subject, setting, chunk, seed))

    def _measure(self, subject: Subject, setting: Setting, chunk: list[Sample], seed: int) -> Moved:
        n, tokens = chunk[0].n, self.tokens(subject, chunk)
        layers, _ = self.look(subject, chunk, n)
        watched = watch(subject.model, setting, tokens, n, seed)
        found: dict[str, list[Tensor]] = {}
        for at, layer in enumerate(layers):
            kept = watched.asked(at, n, layer.x_BNRT.shape[1])
            for name, value in perturbation.measures(layer, kept).items():
                found.setdefault(name, []).append(value.mean(-1))
        by_layer = {name: torch.stack(parts) for name, parts in found.items()}
        guess = watched.logits_BSV.argmax(-1).cpu()
        return Moved(by_layer["l1"], by_layer["layer_l1"][..., 0], by_layer["mass"], watched.held, guess)

    def pictures(self, table: Any, out: Path) -> None:
        """Figure 6: by layer, at the middle one of the budgets."""
        if table.budgets:
            k = table.budgets[len(table.budgets) // 2]
            lines = by_setting(table, k, {f"layer_{i}_l1": i for i in range(DEEP)})
            path, up = out / "perturbation-layers.png", "||o - o^||_1 of a layer's heads together"
            plot(lines, path, f"How far each layer's output moves, k = {k}", "layer", up)


def right(chunk: list[Sample], guess_BS: Tensor) -> list[float]:
    """Of each row the share of right answers; of right next tokens where nothing is asked."""
    rows, answers, n = torch.stack([sample.data[1] for sample in chunk]), chunk[0].data[2], chunk[0].n
    found = guess_BS == rows[:, n:] if answers is None else Batch(rows, n, answers).correct(guess_BS)
    return found.double().mean(-1).tolist()


def _figures(moved: Moved) -> Iterator[dict[str, float]]:
    for b in range(moved.l1_LBN.shape[1]):
        layers = moved.layer_l1_LB[:, b]
        found = {"l1": moved.l1_LBN[:, b].mean(), "layer_l1": layers.mean(), "mass": moved.mass_LBN[:, b].mean()}
        found |= {f"layer_{i}_l1": one for i, one in enumerate(layers[:DEEP])}
        yield {name: value.item() for name, value in found.items()}
