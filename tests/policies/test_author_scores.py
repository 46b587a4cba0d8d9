"""What r_kv, vase and tri_attention keep is what the authors' code keeps; author_scores.py wrote it down."""

import json

import pytest
import torch

import kvpatch
from kvpatch.policies import noise
from kvpatch.policies.calibration import Calibration
from kvpatch.policies.context import EvictionContext, Limits
from kvpatch.policies.needs import Held, LastLogits, LastQueries
from tests.helpers.contexts import reading
from tests.policies.author_scores import CASES, SHAPE, TABLE, queries_of, random_text, turns

AUTHORS = json.loads(TABLE.read_text())


class Given(LastQueries):
    """Last queries whose logits are given."""

    def view(self, context):
        x_BHGWT, candidate_BHT = context.layer_read.logits()
        return LastLogits(x_BHGWT, candidate_BHT, counted_BW=torch.ones(1, self.width, dtype=torch.bool))


def context_of(text, window, protected, prompt):
    """The moment at which the authors' code evicts: all tokens held, in text order."""
    q, keys, values = text
    H, G, T, D = SHAPE.values()
    x = q[:, :, T - window :].view(1, H, G, window, D) @ keys.transpose(-1, -2)[:, :, None] / D**0.5
    positions = torch.arange(T).expand(1, H, T)
    candidate = positions < T - window
    x = x.masked_fill(~candidate[:, :, None, None], torch.finfo(x.dtype).min)
    newest = torch.tensor([[[T - 1]]])
    return EvictionContext(
        layer=0, seed=0, positions_BHT=positions, newest_B11=newest, recent_B11=newest - window, state={},
        limits=Limits.of([(0, window, prompt, protected, window, 0)], torch.device("cpu")), group=G, sliding=None, empty=False,
        needs=(Held(), Given(window)), layer_read=reading(held=(keys, values), logits=(x, candidate)),
    )  # fmt: skip


def calibration_of(text):
    """Of one layer of the authors' model."""
    (H, G, _, D), (mean, norm) = SHAPE.values(), queries_of(text)
    pairs = torch.arange(D).view(2, D // 2).T
    own = {"mean": mean.view(H, G, D), "norm": norm.view(H, G, D // 2), "pairs": pairs, "turn": turns()}
    return Calibration({}, {0: own}, 1, "")


@pytest.mark.parametrize("case", CASES)
def test_kept_tokens_are_the_authors(case, monkeypatch):
    monkeypatch.setattr(noise, "gumbel", torch.zeros_like)  # of a sample, the likeliest
    options = dict(CASES[case])
    budget, ranges = options.pop("budget"), options.get("ranges", 0)
    one = kvpatch.get_policy(case.partition(",")[0])
    for seed, kept in enumerate(AUTHORS[case]):
        text = random_text(seed)
        if "prompt" in options:
            options["calibration"] = calibration_of(text)
        policy = one.with_options(**{name: value for name, value in options.items() if name != "prompt"}, sinks=0)
        prompt = options.get("prompt", 0)  # is kept, and ranked nowhere
        keys = policy.eviction_keys(context_of(text, options.get("window", 0), ranges, prompt), None)
        mine = keys[0].topk(budget - prompt, dim=-1).indices.sort(-1).values.tolist()
        assert [[*range(prompt), *head] for head in mine] == kept, f"seed {seed}"
