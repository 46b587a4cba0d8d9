"""generate() of a patched model."""

import itertools

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

import kvpatch
from tests.helpers.comparing import same_tokens
from tests.helpers.running import RAGGED
from tests.helpers.tiny import FIVE, make, prompt

# the others wait for the last layer, so no generated token may come in the prompt's pass
DURING = [name for name, policy in RAGGED.items() if not policy.over_model]
CASES = [*itertools.product(FIVE, ("h2o", "keyformer", "tova")), *(("llama_gqa", policy) for policy in DURING)]


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_assisted_decoding_gives_what_plain_decoding_gives(name, policy):
    model, assistant, ids = make(name), make("llama", layers=1, seed=3), prompt(1, 40 if policy in RAGGED else 25)
    with kvpatch.patched(model, RAGGED.get(policy, policy), 0.5) as patch:
        plain = model.generate(ids, max_new_tokens=20, do_sample=False)
        held = [p.sort(-1).values for p in patch.report().positions]
        lookup = model.generate(ids, max_new_tokens=20, do_sample=False, prompt_lookup_num_tokens=4)
        assisted = model.generate(ids, max_new_tokens=20, do_sample=False, assistant_model=assistant)
        # the last accepted token may not have been fed yet, so compare where both have seen the same
        if patch.report().seen == ids.shape[1] + 19:
            assert same_tokens(held, [other.sort(-1).values for other in patch.report().positions])
    assert torch.equal(plain, assisted)
    assert torch.equal(plain, lookup)


@pytest.mark.parametrize("how", ["assistant", "early exit"])
def test_a_generated_pad_token_is_no_padding_for_the_assistant(how):
    """The assistant's generate() is given no mask, and would make one that leaves pad tokens out."""
    model, assistant, ids = make("llama_gqa"), make("llama_gqa"), prompt(1, 31, seed=4)
    with kvpatch.patched(model, "h2o", 0.5), kvpatch.patched(assistant, "h2o", 0.5):
        plain = model.generate(ids, max_new_tokens=12, do_sample=False)
        given = {"assistant_model": assistant} if how == "assistant" else {"assistant_early_exit": 1}
        pad = int(plain[0, 34])
        assert torch.equal(plain, model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=pad, **given))


def test_mpt_evicts_although_its_config_says_no_cache():
    """MptConfig's default is use_cache=False; generate() inside the block uses one unless the caller said no."""
    model, ids = make("mpt"), prompt(1, 30)
    model.config.use_cache = model.generation_config.use_cache = False
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert patch.report().held().unique().tolist() == [15]
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, use_cache=False)
        assert patch.report().passes == {"no_cache": (4, 0)}
        assert "tokens held  none: no pass had a cache" in str(patch.report())


def test_assisted_decoding_under_one_budget_for_all_layers_is_refused():
    model, assistant, ids = make("llama_gqa"), make("llama", layers=1, seed=3), prompt(1, 40)
    refused = pytest.raises(kvpatch.KVPatchError, match=r"Use adaptive\(\) in place of global_topk\(\)")
    with kvpatch.patched(model, RAGGED["global_topk_snapkv"], 0.5), refused:
        model.generate(ids, assistant_model=assistant, max_new_tokens=8, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize("error", [kvpatch.KVPatchError, KeyboardInterrupt])
def test_a_model_runs_all_its_layers_again_after_an_early_exit_that_failed(error):
    """transformers sets the number of layers in the configuration while it drafts, and leaves it so after an error."""
    model, ids = make("llama_gqa"), prompt(1, 40)
    plain, before = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0), model.config.to_dict()
    refuses = error is kvpatch.KVPatchError
    options = {"chunk": 11, "instruction": (3, 1)} if refuses else {}

    def interrupt(input_ids, scores):
        if model.config.num_hidden_layers == 1:  # while it drafts
            raise error
        return scores

    with kvpatch.patched(model, "kvzip" if refuses else "h2o", 0.5, **options):
        given = {} if refuses else {"logits_processor": LogitsProcessorList([interrupt])}
        want = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
        with pytest.raises(error):
            model.generate(ids, assistant_early_exit=1, max_new_tokens=8, do_sample=False, pad_token_id=0, **given)
        assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0), want)
    assert model.config.to_dict() == before
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0), plain)


@pytest.mark.parametrize(
    ("given", "own"),
    [({"max_new_tokens": 5, "max_length": 90}, None), ({"max_length": 25}, None), ({"max_length": 90}, 5)],
)
def test_a_cache_knows_how_many_tokens_generate_writes(given, own):
    model, ids, told = make("llama_gqa"), prompt(1, 20), []
    model.generation_config.max_new_tokens = own

    def note(input_ids, scores, **kwargs):
        told.append(cache.plans.new_tokens)
        return torch.zeros(1, dtype=torch.bool)

    with kvpatch.patched(model, "keyformer", 8) as patch:
        cache = patch.new_cache()
        given = {**given, "past_key_values": cache, "stopping_criteria": StoppingCriteriaList([note])}
        model.generate(ids, do_sample=False, pad_token_id=0, **given)
    assert told == [5] * 5
