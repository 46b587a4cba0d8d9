"""Law 6: block= over one forward is feeding blocks one after another; gradients agree with a naive autograd version."""

import functools

import pytest
import torch

import kvpatch
from tests.helpers.comparing import EVICTING, SMALL, WAITING
from tests.helpers.running import logits_of, no_dropout
from tests.helpers.tiny import FIVE, MORE, force, left_pad, make, prompt
from tests.helpers.training import agrees_with_naive_autograd


@pytest.mark.parametrize("policy", ["h2o", "roco", "keyformer", "snapkv", "adakv", "random"])
@pytest.mark.parametrize("name", [*FIVE, *MORE])
def test_one_forward_equals_block_after_block(name, policy):
    model, ids = make(name, dtype=torch.float64), prompt(2, 38)
    options = SMALL.get(policy, {})
    with torch.no_grad(), kvpatch.patched(model, policy, 9, block=8, **options) as patch:
        whole = patch.new_cache()
        logits = logits_of(model, ids, past_key_values=whole)
    with torch.no_grad(), kvpatch.patched(model, policy, 9, **options) as patch:
        pieces = patch.new_cache()
        parts = [logits_of(model, ids[:, start : start + 8], past_key_values=pieces) for start in range(0, 38, 8)]
    torch.testing.assert_close(logits, torch.cat(parts, 1), atol=1e-9, rtol=0)
    for layer in range(2):
        assert torch.equal(*(cache.positions(layer).sort(-1).values for cache in (whole, pieces)))


@pytest.mark.parametrize("policy", ["h2o", "critical_snapkv", "window"])
@pytest.mark.parametrize("name", [*FIVE, *MORE])
def test_without_a_cache_and_in_training_mode_the_same_is_computed(name, policy):
    model, ids = make(name, dtype=torch.float64), prompt(2, 40)
    mask = left_pad(ids, [40, 29])
    with torch.no_grad():
        full = logits_of(model, ids, mask, use_cache=False)
        with kvpatch.patched(model, policy, 0.3, block=7, **SMALL.get(policy, {})):
            out = model(ids, attention_mask=mask, use_cache=True)
            assert out.past_key_values.held(0).tolist()
            without = model(ids, attention_mask=mask, use_cache=False)
            assert without.past_key_values is None
            no_dropout(model).train()
            trained = model(ids, attention_mask=mask)
            model.eval()
    real = mask.bool()
    torch.testing.assert_close(without.logits[real], out.logits[real], atol=1e-9, rtol=0)
    torch.testing.assert_close(trained.logits[real], out.logits[real], atol=1e-9, rtol=0)
    assert not torch.allclose(full[real], out.logits[real], atol=1e-3)


@pytest.mark.parametrize("policy", [policy for policy in EVICTING if policy not in WAITING])
def test_generate_reads_its_prompt_in_blocks(policy):
    model, ids = make("llama_gqa"), prompt(2, 45)
    mask = left_pad(ids, [45, 38])
    options = SMALL.get(policy, {})
    with kvpatch.patched(model, policy, 0.4, block=9, **options) as patch:
        out = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
        generated = [p.sort(-1).values for p in patch.report().positions]
    with kvpatch.patched(model, policy, 0.4, block=9, **options):
        _, cache = force(model, ids, out[:, 45:-1], mask)
    assert [g.shape[-1] for g in generated]
    for layer, positions in enumerate(generated):
        mine = cache.positions(layer)
        for row in range(2):
            for head in range(2):
                assert set(positions[row, head].tolist()) - {-1} == set(mine[row, head].tolist()) - {-1}


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "adakv", "window"])
def test_generate_in_chunks_that_are_whole_blocks(policy):
    """prefill_chunk_size feeds the prompt in several forwards; a share counts the whole prompt all the same."""
    model, ids = make("llama_gqa"), prompt(2, 45)
    mask = left_pad(ids, [45, 45])
    kwargs = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with kvpatch.patched(model, policy, 0.4, block=9, **SMALL.get(policy, {})) as patch:
        want = model.generate(ids, **kwargs)
        held = [p.sort(-1).values for p in patch.report().positions]
        got = model.generate(ids, prefill_chunk_size=18, **kwargs)
        again = [p.sort(-1).values for p in patch.report().positions]
    assert torch.equal(want, got)
    assert all(map(torch.equal, held, again))


@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": False}, {"use_reentrant": True}], ids=str)
@pytest.mark.parametrize("policy", ["roco", "keyformer", "critical_adakv"])
@pytest.mark.parametrize("name", [*FIVE, *MORE])
def test_gradients_agree_with_naive_autograd(name, policy, checkpointing):
    agrees_with_naive_autograd(functools.partial(make, name), policy, checkpointing)
