"""What r_kv and vase keep is what the authors' own code keeps, as tools/reliability/author_scores.py wrote it down."""

import json

import pytest
import torch

import kvpatch
from kvpatch.policies import noise
from kvpatch.policies.context import EvictionContext, Limits
from kvpatch.policies.queries import Looks
from tools.reliability.author_scores import CASES, SHAPE, TABLE, random_text

AUTHORS = json.loads(TABLE.read_text())


def context_of(text, window, protected):
    """The moment at which the authors' code evicts: all tokens held, in text order."""
    q, keys, values = text
    H, G, T, D = SHAPE.values()
    x = q[:, :, -window:].view(1, H, G, window, D) @ keys.transpose(-1, -2)[:, :, None] / D**0.5
    positions = torch.arange(T).expand(1, H, T)
    candidate = positions < T - window
    x = x.masked_fill(~candidate[:, :, None, None], torch.finfo(x.dtype).min)
    newest = torch.tensor([[[T - 1]]])
    return EvictionContext(
        layer=0, seed=0, positions_BHT=positions, newest_B11=newest, recent_B11=newest - window, state={},
        limits=Limits.of([(0, window, 0, protected, window, 0)], torch.device("cpu")), group=G, sliding=None, empty=False,
        held=lambda: (keys, values), recent=lambda: Looks(x, candidate),
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_kept_tokens_are_the_authors(case, monkeypatch):
    monkeypatch.setattr(noise, "gumbel", torch.zeros_like)  # of a sample, the likeliest
    options = dict(CASES[case])
    budget, ranges = options.pop("budget"), options.get("ranges", 0)
    policy = kvpatch.get_policy(case.partition(",")[0]).with_options(**options, sinks=0)
    for seed, kept in enumerate(AUTHORS[case]):
        keys = policy.eviction_keys(context_of(random_text(seed), options["window"], ranges), None)
        mine = keys[0].topk(budget, dim=-1).indices.sort(-1).values.tolist()
        assert mine == kept, f"seed {seed}"
