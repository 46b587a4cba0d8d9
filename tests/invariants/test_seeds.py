"""Law 7: the same seed gives the same text; another one may not."""

import pytest
import torch

import kvpatch
from tests.helpers.tiny import make, prompt


@pytest.mark.parametrize("policy", ["random", "keyformer"])
def test_same_seed_same_text_another_seed_another_set(policy):
    model, ids = make("llama_gqa"), prompt(1, 50)

    def text(seed):
        with kvpatch.patched(model, policy, 0.3, seed=seed) as patch:
            out = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
            return out, patch.report().positions[0].sort(-1).values

    (a, held_a), (b, held_b), (_, held_c) = text(5), text(5), text(6)
    assert torch.equal(a, b)
    assert torch.equal(held_a, held_b)
    assert not torch.equal(held_a, held_c)


def test_sampling_with_a_seed_repeats():
    model, ids = make("llama_gqa"), prompt(2, 40)

    def text(seed):
        torch.manual_seed(seed)
        with kvpatch.patched(model, "keyformer", 0.3):
            return model.generate(ids, max_new_tokens=12, do_sample=True, pad_token_id=0)

    assert torch.equal(text(1), text(1))
    assert not torch.equal(text(1), text(2))
