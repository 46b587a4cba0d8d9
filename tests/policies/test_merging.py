"""Merging of evicted values: its gradients, and rounded entries; the oracle has the values."""

import pytest
import torch

import kvpatch
from kvpatch.policies import Merge
from tests.helpers.tiny import make, prompt


def test_gradients_are_those_of_the_formula():
    numbers = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 2, 9, 4, generator=numbers, dtype=torch.float64, requires_grad=True) for _ in range(2))
    index = torch.tensor([[[0, 3, 4, 8], [1, 2, 6, 6]]])
    kept, live = torch.tensor([[[True] * 4, [True] * 3 + [False]]]), torch.arange(9).expand(1, 2, 9) != 7
    assert torch.autograd.gradcheck(lambda k, v: Merge().values(k, v, index, kept, live)[kept], (k, v))


def test_what_is_rounded_is_the_merged_value():
    """A pass that computes gradients attends to the same numbers as one that does not."""
    model, ids = make("llama_gqa", dtype=torch.float64), prompt(2, 40)
    with kvpatch.patched(model, "merged(h2o)", 12, block=9, bits=8):
        with torch.no_grad():
            want = model(ids).logits
        torch.testing.assert_close(model(ids).logits, want)


@pytest.mark.parametrize("given", [-0.1, 1.5, 2, True, "0.5", None, float("nan")])
def test_what_is_no_cosine(given):
    with pytest.raises(kvpatch.KVPatchError, match=r"threshold=.* must be a cosine in \[0, 1\]"):
        kvpatch.merged("h2o", threshold=given).check()


@pytest.mark.parametrize("given", [0, 0.0, 0.5, 1, 1.0])
def test_what_is_a_cosine(given):
    assert kvpatch.merged("h2o", threshold=given).merging.threshold == given
