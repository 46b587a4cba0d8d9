"""Kept tokens and refitted values are Attention Matching's own code's; matching_scores.py wrote them."""

import json

import pytest
import torch

import kvpatch
from tests.policies.matching_scores import CASES, KEPT, SOLVED, TABLE
from tests.policies.peer_scores import small_model, text

AUTHORS = json.loads(TABLE.read_text())


def read(policy, **options):
    """Positions of each layer and head, ascending, and the values at them."""
    model = small_model()
    with torch.no_grad(), kvpatch.patched(model, policy, KEPT, **options) as patch:
        cache = patch.new_cache()
        model(text(), past_key_values=cache)
    for layer, slots in enumerate(cache.layers):
        places, order = cache.positions(layer)[0, :, :KEPT].sort()
        yield places, slots.values[0].gather(1, order[..., None].expand(-1, -1, slots.values.shape[-1]))


@pytest.mark.parametrize("case", CASES)
def test_keys_of_the_highest_attention(case):
    policy, options, _ = CASES[case]
    assert [places.tolist() for places, _ in read(policy, **options)] == AUTHORS[case]


@pytest.mark.parametrize("case", SOLVED)
def test_values_without_biases(case):
    ridge, every = SOLVED[case]
    queries = -(-text().shape[1] // every)
    for (places, values), kept, sizes in zip(
        read("refit(kvzip)", floor=1.0, sinks=0, ridge=ridge, queries=queries),
        AUTHORS["a second reading's queries"], AUTHORS[case], strict=True,
    ):  # fmt: skip
        assert places.tolist() == kept
        torch.testing.assert_close(values.norm(dim=-1), torch.tensor(sizes, dtype=values.dtype), rtol=2e-4, atol=2e-4)
