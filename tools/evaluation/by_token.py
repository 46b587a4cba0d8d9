"""In which share of heads does two-stage selection move the output less, token by token [CriticalKV Figure 5]?

As perturb.py, at the first, third and fifth token. A sample is an article of MultiNews in LongBench's prompt and what the
full cache writes of its summary; without --data recall's context and the answers behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from tools.evaluation import perturbation

from . import templates
from .greedy import generate
from .longbench_sets import SETS, read
from .observe import Watched, watch
from .perturb import Moved, Perturbation, base_of, heads_lower
from .rows import alike
from .task import Request, Sample, Setting, Subject, digest

TOKENS, SET = (1, 3, 5), "multi_news"


class ByToken(Perturbation):
    name = "by_token"
    about = "In which share of heads does two-stage selection move attention's output less, at tokens 1, 3 and 5?"
    source = "[CriticalKV 4.6, Figure 5]"
    metric = "heads_lower_1"
    metrics: ClassVar[dict[str, str]] = {
        f"heads_lower_{token}": f"share of (layer, head) in which l1 of token {token} is lower, equal sets left out"
        for token in TOKENS
    }
    better = "higher"

    def samples(self, subject: Subject, request: Request, seed: int) -> list[Sample]:
        if request.data is None:
            made = super().samples(subject, request, seed)
            return [sample for sample in made if sample.group["scenario"] == "recall after"]
        tokenizer, one = templates.tokenizer_of(subject, self.name), SETS[SET]
        around, found = templates.frame("auto", tokenizer), []
        for i, row in enumerate(read(SET, request.data, request.count or self.count) or ()):
            ids, _ = templates.fit(subject, templates.encode(subject, around, *one.parts(row))[0], TOKENS[-1] + 1)
            written = generate(subject, [ids], TOKENS[-1] + 1)[0]
            if len(written) > TOKENS[-1]:
                tokens = torch.tensor([*ids, *written])
                found.append(Sample(f"{i:03}", len(ids), (tokens[:-1], tokens, None), {"scenario": SET}, digest(tokens)))
        return found

    def run(
        self, subject: Subject, setting: Setting, samples: list[Sample], request: Request, seed: int
    ) -> Iterator[dict[str, Any]]:
        base = base_of(setting)
        for chunk in alike(samples, request.batch):
            if base is None:
                yield from ({} for _ in chunk)
                continue
            n, tokens = chunk[0].n, self.tokens(subject, chunk)
            layers, _ = self.look(subject, chunk, n)
            plain, chosen = (watch(subject.model, one, tokens, n, seed) for one in (base, setting))
            moved = [_l1(layers, watched, n) for watched in (plain, chosen)]
            shares = {
                f"heads_lower_{token}": heads_lower(_at(moved[0], plain, token), _at(moved[1], chosen, token))
                for token in TOKENS
            }
            for b in range(len(chunk)):
                yield {name: own[b] for name, own in shares.items() if own[b] is not None}


def _l1(layers: list[perturbation.Layer], watched: Watched, n: int) -> Tensor:
    """||o - o^||_1 of every query behind the prompt, [L,B,N,Q]."""
    kept = (watched.asked(at, n, layer.x_BNRT.shape[1]) for at, layer in enumerate(layers))
    return torch.stack([perturbation.measures(layer, one)["l1"] for layer, one in zip(layers, kept, strict=True)])


def _at(l1_LBNQ: Tensor, watched: Watched, token: int) -> Moved:
    """What heads_lower reads of one query."""
    l1_LBN = l1_LBNQ[..., token - 1]
    return Moved(l1_LBN, l1_LBN[..., 0], l1_LBN, watched.held, watched.logits_BSV)
