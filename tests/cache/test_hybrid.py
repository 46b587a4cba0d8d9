"""Hybrids: layers with keys and values are on the budget, transformers' own layers carry their states along."""

from contextlib import nullcontext

import pytest
import torch
from transformers import CompileConfig, DynamicCache, Lfm2Config, Lfm2ForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

import kvpatch
from kvpatch.arch.upstream import HYBRIDS
from kvpatch.cache.cache import EvictingCache
from kvpatch.evaluation.teacher_forcing import feed
from kvpatch.hooks.target import Target

pytestmark = pytest.mark.skipif(not HYBRIDS, reason="models of this transformers take states from the cache's layers")
WIDTHS = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}


def make():
    """Qwen3-Next: two gated delta nets around each of two attention layers, the last of them behind both."""
    torch.manual_seed(0)
    kinds = ["linear_attention", "full_attention", "full_attention", "linear_attention"]
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    config = Qwen3NextConfig(
        **WIDTHS, **linear, num_hidden_layers=4, layer_types=kinds, head_dim=8, num_experts=0, pad_token_id=0,
        attn_implementation="sdpa",
    )  # fmt: skip
    return Qwen3NextForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model():
    return make()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(1, 64, (2, 24), generator=torch.Generator().manual_seed(1))


def run(model, cache, ids):
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits[:, -1]


def test_k_one_and_a_whole_generate(model, ids):
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    with kvpatch.patched(model, "h2o", 1.0):
        assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), expected)
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        model.generate(ids, max_new_tokens=6, do_sample=False)
    report = patch.report()
    assert report.layers == (1, 2) and report.states == (0, 3) and report.nbytes < report.full_nbytes
    assert report.state_nbytes == report.to_dict()["state_nbytes"] == 2 * 2 * 4 * (64 * 4 + 4 * 8 * 8)
    assert "0, 3 keep a state of fixed size" in str(report) and len(report.positions) == 2


def test_checks_pass(model):
    table = kvpatch.check_model(model, "h2o", 0.5)
    assert table.passed, table


def test_rows_of_a_padded_batch_are_as_alone(model, ids):
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    with kvpatch.patched(model, "h2o", 0.5):
        both = feed(model, ids, 20, mask).logits_BSV
        alone = feed(model, ids[1:, 7:], 13).logits_BSV
    torch.testing.assert_close(both[1:], alone, rtol=1e-4, atol=1e-5)


def test_padding_between_tokens_is_refused(model, ids):
    """A state reads it, in the unpatched model too: a row would not be as alone."""
    later, gapped, right = (torch.ones_like(ids) for _ in range(3))
    later[1, 16:18], gapped[1, 5:8], right[1, 15:] = 0, 0, 0
    with kvpatch.patched(model, "h2o", 0.5) as patch, torch.no_grad():
        cache = patch.new_cache()
        model(ids[:, :16], past_key_values=cache)
        for given in ({"input_ids": ids[:, 16:], "attention_mask": later}, {"input_ids": ids, "attention_mask": gapped}):
            with pytest.raises(kvpatch.KVPatchError, match="padding between tokens of a row, which the layers of this hybrid"):
                model(**given, past_key_values=cache if given["attention_mask"] is later else None)
        read = model(ids, attention_mask=right).past_key_values  # of which nobody reads the padded rows' last columns
        with pytest.raises(kvpatch.KVPatchError, match="padding between tokens of a row"):
            model(ids[:, :1], attention_mask=torch.cat([right, right[:, :1]], 1), past_key_values=read)
    with kvpatch.patched(model, "h2o", 1.0):
        model(ids, attention_mask=gapped)


def test_states_follow_rows_copies_and_files(model, ids, tmp_path):
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        cache = patch.new_cache()
        run(model, cache, ids)
        patch.save_cache(cache, tmp_path / "cache.safetensors")
        copy, loaded, row = cache.clone(), patch.load_cache(tmp_path / "cache.safetensors"), cache.select_rows(1)
        first = patch.new_cache()
        run(model, first, ids[:1])
        joined = EvictingCache.concatenate([row.clone(), first])
        swapped = cache.clone()
        swapped.reorder_cache(torch.tensor([1, 0]))
        repeated = cache.clone()
        repeated.batch_repeat_interleave(2)
        repeated.batch_select_indices(torch.tensor([0, 2]))
        more = ids[:, :1]
        expected = run(model, cache, more)
        for other in (copy, loaded, repeated):
            torch.testing.assert_close(run(model, other, more), expected, rtol=0, atol=0)
        for other in (swapped, joined):
            torch.testing.assert_close(run(model, other, more.flip(0)), expected.flip(0), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(run(model, row, more[1:]), expected[1:], rtol=1e-5, atol=1e-5)
        cache.reset()
        assert cache.states.nbytes == 0 and cache.get_seq_length() == 0


def test_prefix_record_and_replay(model, ids):
    text = torch.cat([ids, ids[:, :3]], 1)
    with kvpatch.patched(model, "h2o", 12) as patch:
        whole = model.generate(text[:1], max_new_tokens=4, do_sample=False, past_key_values=patch.prefix(ids[:1]))
        cache = patch.new_cache()
        run(model, cache, ids[:1])
        assert torch.equal(model.generate(text[:1], max_new_tokens=4, do_sample=False, past_key_values=cache), whole)
    with kvpatch.patched(model, "h2o", 12, record=True) as patch:
        logits = feed(model, text, 20).logits_BSV
        record = patch.record()
    with kvpatch.replay(model, record), torch.no_grad():
        torch.testing.assert_close(model(text).logits[:, 19:], logits, rtol=1e-4, atol=1e-5)


def test_a_second_reading_leaves_the_states_as_the_prompt_left_them(model, ids):
    with kvpatch.patched(model, "window", 12) as patch:
        plain = patch.new_cache()
        run(model, plain, ids)
    with kvpatch.patched(model, "kvzip", 0.5) as patch:
        reread = patch.new_cache()
        run(model, reread, ids)
    assert not reread.unfinished
    torch.testing.assert_close(reread.states.tensors(), plain.states.tensors(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("policy", ["h2o", "kvzip"])
def test_states_that_were_written_in_inference_mode_go_on_outside(model, ids, policy):
    """Also those that a second reading has put back."""
    step, found = ids[:, :1], []
    for inference in (False, True):
        with kvpatch.patched(model, policy, 8) as patch:
            cache = patch.new_cache()
            with torch.inference_mode(inference):
                run(model, cache, ids)
                run(model, cache, step)
            assert not any(state.is_inference() for state in cache.states.tensors().values())
            found.append(run(model, cache, step))
    assert torch.equal(*found)


def test_a_pass_that_fails_behind_the_last_budget_is_noticed(model, ids):
    def broken(*args):
        raise InterruptedError

    with kvpatch.patched(model, "h2o", 0.5) as patch:
        cache = patch.new_cache()
        hook = model.model.layers[3].register_forward_hook(broken)
        try:
            with pytest.raises(InterruptedError):
                run(model, cache, ids)
        finally:
            hook.remove()
        with pytest.raises(kvpatch.KVPatchError, match="did not finish"):
            run(model, cache, ids)


@pytest.mark.parametrize("inference", [True, False])
def test_a_pass_that_ends_behind_the_last_budget_leaves_a_cache_that_can_be_written(model, ids, inference):
    with torch.inference_mode(inference), torch.no_grad(), kvpatch.patched(model, "h2o", 0.5) as patch:
        cache = patch.new_cache()
        for part in (ids, ids[:, :1]):
            model(part, past_key_values=cache)
        assert not any(one.is_inference() for one in vars(cache.counters.tensors).values())


@pytest.mark.parametrize("strict", [True, False])
def test_a_cache_that_contradicts_itself_is_noticed_behind_the_last_budget(model, ids, strict):
    with kvpatch.patched(model, "h2o", 0.5, strict=strict) as patch:
        cache = patch.new_cache()
        run(model, cache, ids)
        cache.layers[1].positions[1, 0, :4] = 0
        wrong = pytest.raises(kvpatch.KVPatchError, match="contradicts itself: layer 1: a head holds a token twice")
        with wrong if strict else nullcontext():
            run(model, cache, ids[:, :1])


def test_what_a_state_cannot_do_is_refused(model, ids):
    with torch.no_grad():
        past = model(ids, past_key_values=DynamicCache(config=model.config)).past_key_values
    with kvpatch.patched(model, "window", 12) as patch:
        cache = patch.new_cache()
        cache.activate_past_recording()
        run(model, cache, ids)
        run(model, cache, ids[:, :1])
        with pytest.raises(kvpatch.KVPatchError, match="layers 0, 3 of this hybrid keep a recurrent state"):
            cache.crop(-1)
        with pytest.raises(kvpatch.KVPatchError, match="is not taken over"):
            patch.new_cache(past)
        with pytest.raises(kvpatch.KVPatchError, match="use generate"):
            model.init_continuous_batching()
        with pytest.raises(kvpatch.KVPatchError, match="leave compile_config out"):
            model.generate(ids, max_new_tokens=2, compile_config=CompileConfig())
        with pytest.raises(kvpatch.KVPatchError, match="not captured"):
            patch.graph(model)


@pytest.mark.parametrize("emptied", [False, True])
def test_convolutions_are_rolled_back(emptied):
    """Also in a cache that records, is emptied, and records the next text."""
    torch.manual_seed(0)
    kinds = ["conv", "full_attention", "conv"]
    config = Lfm2Config(**WIDTHS, num_hidden_layers=3, layer_types=kinds, block_auto_adjust_ff_dim=False)
    model, ids = Lfm2ForCausalLM(config).eval(), torch.arange(1, 25)[None]
    with kvpatch.patched(model, "window", 12) as patch:
        cache = patch.new_cache()
        run(model, cache, ids)
        copy = cache.clone()
        cache.activate_past_recording()
        if emptied:
            cache.reset()
            run(model, cache, ids)
        for token in (5, 6):
            run(model, cache, torch.tensor([[token]]))
        cache.crop(-2)
        token = torch.tensor([[7]])
        torch.testing.assert_close(run(model, cache, token), run(model, copy, token), rtol=1e-5, atol=1e-6)


def test_convolutions_stop_recording_after_assisted_decoding():
    """Else their states grow by every later token. The next tokens are as without assistance."""
    torch.manual_seed(0)
    kinds, kernel = ["conv", "full_attention", "conv"], 3
    config = Lfm2Config(**WIDTHS, num_hidden_layers=3, layer_types=kinds, block_auto_adjust_ff_dim=False, conv_L_cache=kernel)
    model, found = Lfm2ForCausalLM(config).eval(), []
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with kvpatch.patched(model, "window", 12) as patch:
        for assisted in ({}, {"prompt_lookup_num_tokens": 3}):
            cache = patch.new_cache()
            text = model.generate(torch.arange(1, 25)[None], past_key_values=cache, **options, **assisted)
            text = model.generate(text, past_key_values=cache, **options)
            found.append((text, run(model, cache, text[:, -1:])))
            states = cache.states.tensors()
            assert {state.shape[-1] for name, state in states.items() if "conv" in name} == {kernel}
            assert all(state.untyped_storage().nbytes() == state.nbytes for state in states.values())
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-5, atol=1e-6)


def test_a_version_whose_models_look_into_the_cache_s_layers_is_refused(model, monkeypatch):
    monkeypatch.setattr("kvpatch.hooks.hybrid.HYBRIDS", False)
    with pytest.raises(kvpatch.KVPatchError, match=r"recurrent state, which this transformers keeps where .*pip install -U"):
        Target.find(model)
