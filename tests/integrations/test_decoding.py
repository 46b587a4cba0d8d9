"""Decoding under eviction beside what it must equal: itself without assistance, the oracle, two texts for guidance."""

import copy

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

import kvpatch
from kvpatch.hooks import generate
from tests.helpers.comparing import certain
from tests.helpers.tiny import FIVE, IDS, VOCAB, make, prompt, spread_weights

NEW = Version(transformers.__version__) >= Version("5.18")
POLICIES = {"h2o": {}, "keyformer": {}, "tova": {}, "roco": {}, "snapkv": {"window": 5}, "adakv": {"window": 5}}


def decode(model, ids, **options):
    options = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0, **options}
    out = model.generate(ids, return_dict_in_generate=True, output_logits=True, **options)
    cache = out.past_key_values
    held = [cache.positions(layer).sort(-1).values for layer in range(2)] if isinstance(cache, kvpatch.EvictingCache) else []
    return out.sequences, torch.stack(out.logits, 1), cache.get_seq_length(), held


def near(model, seed=5):
    """A draft model that is right now and then."""
    twin, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.ndim == 2:
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return twin


def same(one, other):
    assert torch.equal(one[0], other[0])
    torch.testing.assert_close(one[1], other[1], atol=1e-9, rtol=0)
    assert one[2] == other[2]
    for mine, theirs in zip(one[3], other[3], strict=True):
        assert mine[mine >= 0].tolist() == theirs[theirs >= 0].tolist()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FIVE)
def test_assistance_changes_no_logit_and_no_kept_token(name, policy):
    model, ids = make(name, dtype=torch.float64), prompt(1, 25)
    draft = near(model)
    with kvpatch.patched(model, policy, 0.5, **POLICIES[policy]):
        plain = decode(model, ids)
        same(plain, decode(model, ids, prompt_lookup_num_tokens=4))
        if name != "mistral_sliding" or NEW:  # transformers 5.17 fails on an unpatched assistant with a sliding window
            same(plain, decode(model, ids, assistant_model=draft))
        with kvpatch.patched(draft, policy, 0.4, **POLICIES[policy]):
            same(plain, decode(model, ids, assistant_model=draft))


def test_an_assistant_that_is_no_longer_behind_its_text_reads_it_again():
    draft, ids = make("llama_gqa"), prompt(1, 25)
    with torch.no_grad(), kvpatch.patched(draft, "h2o", 0.4) as patch:
        for columns, seen in ((26, 25), (25, 0), (None, 25)):
            cache = patch.new_cache()
            draft(ids, past_key_values=cache)
            generate._prepare_drafts(cache, columns, {})
            assert cache.get_seq_length() == seen


def test_drafts_are_taken_in_part():
    """What the test above needs: some drafts are right and some wrong, so that some are taken back."""
    model, ids, passes = make("llama_gqa", dtype=torch.float64), prompt(1, 25), []
    draft = near(model)
    model.register_forward_pre_hook(lambda module, args, kwargs: passes.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    with kvpatch.patched(model, "h2o", 0.5):
        decode(model, ids, assistant_model=draft)
    fed = sum(passes) - 25
    assert len(passes) < 14, "drafts were accepted"
    assert fed > 14, "drafts were taken back"


ASSISTANTS = {
    "smaller": lambda model: {"assistant_model": make("llama", layers=1, seed=3)},
    "deeper": lambda model: {"assistant_model": make("llama", layers=3, seed=3)},
    "another architecture": lambda model: {"assistant_model": make("gpt2", layers=1, seed=3)},
    "itself": lambda model: {"assistant_model": model},
    "its first layers": lambda model: {"assistant_early_exit": 1},
    "unsure": lambda model: {"assistant_model": _unsure(model)},
}


def _unsure(model):
    draft = near(model)
    draft.generation_config.assistant_confidence_threshold = 0.5
    draft.generation_config.num_assistant_tokens = 7
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    return draft


@pytest.mark.parametrize("budgeted", [False, True])
@pytest.mark.parametrize("kind", ASSISTANTS)
def test_assistants_of_every_kind(kind, budgeted):
    model, ids = make("llama_gqa", dtype=torch.float64), prompt(1, 25)
    options = ASSISTANTS[kind](model)
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        plain = decode(model, ids)
        assistant = options.get("assistant_model")
        if budgeted and assistant is not None and assistant is not model:
            with kvpatch.patched(assistant, "snapkv", 9, window=4):
                same(plain, decode(model, ids, **options))
        else:
            same(plain, decode(model, ids, **options))
        assert patch.report().held().unique().tolist() == [12], "the report is the model's, not its assistant's"


@pytest.mark.parametrize("policy", ["pyramidkv", "adaptive(h2o)", "critical_adakv"])
def test_leaving_early_under_other_allocations(policy):
    model, ids = make("llama_gqa", layers=3, dtype=torch.float64), prompt(1, 30)
    options = {"window": 5} if "kv" in policy else {}
    with kvpatch.patched(model, policy, 0.5, **options):
        same(decode(model, ids), decode(model, ids, assistant_early_exit=2))


def test_an_assistant_reads_again_what_it_cannot_take_back():
    """Its cache evicted on the way; unpatched caches take back anything, and a draft may start anywhere."""
    draft, ids = make("llama", layers=1), prompt(1, 20)
    with kvpatch.patched(draft, "h2o", 0.5) as patch:
        cache = patch.new_cache()
        cache.plans.may_roll_back = True
        draft(ids, past_key_values=cache)
        cache.crop(-3)
        assert cache.get_seq_length() == 0
        cache.plans.may_roll_back = False
        draft(ids, past_key_values=cache)
        with pytest.raises(kvpatch.KVPatchError, match="Cannot roll back 3 tokens"):
            cache.crop(-3)


def test_a_patched_assistant_of_an_unpatched_model():
    model, ids = make("llama_gqa", dtype=torch.float64), prompt(1, 25)
    plain, draft = decode(model, ids), near(model)
    for start in (1, 2, 25):  # a prompt of one token leaves nothing to keep apart
        plain = decode(model, ids[:, :start])
        with kvpatch.patched(draft, "h2o", 6):
            same(plain, decode(model, ids[:, :start], assistant_model=draft))


@pytest.mark.parametrize("name", FIVE)
def test_guidance_is_two_texts_with_a_budget_each(name):
    """Classifier-free guidance reads another prompt through a cache of its own, which the same budget holds for."""
    model, ids, other = make(name), prompt(1, 24), prompt(1, 14, seed=8)
    with kvpatch.patched(model, "h2o", 0.5):
        out = model.generate(
            ids, guidance_scale=1.7, negative_prompt_ids=other, max_new_tokens=8, do_sample=False, pad_token_id=0,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        new = out.sequences[:, 24:]
        with torch.no_grad():
            two = []
            for start in (ids, other):
                step = model(start, use_cache=True)
                logits = [step.logits[:, -1]]
                for t in range(7):
                    step = model(new[:, t : t + 1], past_key_values=step.past_key_values, use_cache=True)
                    logits.append(step.logits[:, -1])
                assert step.past_key_values.held(0).unique().tolist() == [start.shape[1] // 2]
                two.append(torch.stack(logits, 1).log_softmax(-1))
    want = 1.7 * (two[0] - two[1]) + two[1]
    torch.testing.assert_close(torch.stack(out.scores, 1), want, atol=1e-4, rtol=0)


def dynamic(dtype=torch.float32):
    """Positions that are scaled anew where a text gets longer than 24 tokens."""
    torch.manual_seed(0)
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, **heads, max_position_embeddings=24, rope_parameters=rope, **IDS)
    return spread_weights(LlamaForCausalLM(config).eval()).to(dtype)


def test_dynamic_rope_scaling():
    pristine = dynamic()
    for n in (18, 40):  # grows past its positions while generating; begins past them
        ids, model = prompt(2, n), copy.deepcopy(pristine)
        want = decode(copy.deepcopy(pristine), ids, max_new_tokens=12)
        with kvpatch.patched(model, "keyformer", 1.0):
            got = decode(model, ids, max_new_tokens=12)
        assert torch.equal(want[0], got[0])
        torch.testing.assert_close(want[1], got[1], atol=2e-5, rtol=0)
        fixed = LlamaForCausalLM(LlamaConfig(**{**pristine.config.to_dict(), "rope_parameters": None})).eval()
        fixed.load_state_dict(pristine.state_dict())
        assert (decode(fixed, ids, max_new_tokens=12)[1][:, 0] - want[1][:, 0]).abs().max() > 1e-3 or n == 18


@pytest.mark.parametrize("policy", ["h2o", "tova"])
def test_dynamic_rope_scaling_with_eviction(policy):
    # the rows of a batch share one scaling, so that a padded row would not be what it is alone
    certain("llama", policy, 0.5, model=dynamic(torch.float64), pads=(0, 0))


@pytest.mark.parametrize("policy", ["h2o", "snapkv"])
def test_compilation_that_transformers_leaves_out_on_a_cpu(policy):
    model, ids = make("llama_gqa"), prompt(2, 25)
    options = POLICIES[policy]
    with kvpatch.patched(model, policy, 0.5, **options):
        plain = decode(model, ids)
        for asked in ({"compile_config": CompileConfig()}, {"compile_config": CompileConfig(), "disable_compile": True}):
            torch.testing.assert_close(plain[1], decode(model, ids, **asked)[1], atol=1e-5, rtol=0)
