"""Layers that use the keys of a layer before them (Gemma 3n and 4): they hold nothing and see what that layer's queries saw."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, CompileConfig

import kvpatch
from kvpatch.arch.kinds import source_of
from kvpatch.cache.cache import EvictingCache
from kvpatch.evaluation.teacher_forcing import feed
from kvpatch.hooks.target import Target
from tests.helpers.marks import batches, since
from tests.helpers.tiny import left_pad, prompt, snapshot

WIDTHS = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97}
KINDS = ["sliding_attention", "full_attention"]
OWN = {
    # a full layer whose keys no other uses, then the sources, then their readers
    "gemma4_text": {
        "num_hidden_layers": 6, "layer_types": ["sliding_attention", *KINDS[::-1], *KINDS[::-1], "full_attention"],
        "num_kv_shared_layers": 3, "global_head_dim": 16, "intermediate_size": 32,
    },
    "gemma3n_text": {
        "num_hidden_layers": 4, "layer_types": KINDS * 2, "num_kv_shared_layers": 2, "intermediate_size": [32] * 4,
        "activation_sparsity_pattern": [0.0] * 4, "laurel_rank": 8, "altup_num_inputs": 2,
    },
}  # fmt: skip
SOURCES = {"gemma4_text": {3: 1, 4: 2, 5: 1}, "gemma3n_text": {2: 0, 3: 1}}


def make(kind):
    torch.manual_seed(0)
    inputs = {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8, "sliding_window": 7, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, **WIDTHS, **OWN[kind], **inputs)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.25) if parameter.ndim >= 2 else parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.double()


@pytest.fixture(scope="module", params=SOURCES)
def model(request):
    return make(request.param)


@pytest.fixture(scope="module")
def gemma4():
    return make("gemma4_text")


def generate(model, ids, **options):
    asked = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    out = model.generate(ids, return_dict_in_generate=True, **asked, **options)
    return out.sequences, torch.stack(out.logits, 1)


def test_readers_and_their_sources(model):
    target = Target.find(model)
    sources = SOURCES[model.config.model_type]
    assert dict(target.layer_numbers.readers) == sources
    assert [target.attentions[index][0].layer_idx for index, _ in target.readers] == list(sources.values())
    assert [module.layer_idx for _, (module, _) in target.readers] == list(sources)


def test_what_a_prompt_showed_goes_with_its_pass(model):
    """All keys of a prompt stayed beside those that were kept, until the next pass."""
    with kvpatch.patched(model, "window", 6) as patch:
        cache = patch.new_cache()
        with torch.no_grad():
            model(prompt(1, 60), past_key_values=cache)
        assert not cache.now.shared_keys


def test_one_changes_nothing(model):
    ids, before = prompt(2, 20), snapshot(model)
    for options in ({}, {"attention_mask": left_pad(ids, [20, 13])}, {"prefill_chunk_size": 6}):
        want = generate(model, ids, **options)
        with kvpatch.patched(model, "h2o", 1.0):
            got = generate(model, ids, **options)
        assert torch.equal(got[0], want[0])
        torch.testing.assert_close(got[1], want[1], atol=1e-5, rtol=0)
    with kvpatch.patched(model, "h2o", 1.0):
        beams = model.generate(ids, num_beams=3, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(beams, model.generate(ids, num_beams=3, max_new_tokens=5, do_sample=False, pad_token_id=0))
    assert snapshot(model) == before


@pytest.mark.parametrize(
    "policy",
    ["h2o", "snapkv", "adakv", "kvzip", kvpatch.get_policy("h2o").with_options("both", every=3), "keyformer"],
    ids=lambda policy: policy if isinstance(policy, str) else "every",
)
def test_evictions_are_those_of_the_model_under_a_mask(model, policy):
    """A reader's mask is its source's."""
    table = kvpatch.check_model(model, policy, 0.4)
    assert table.passed, table


@since("5.23", "its last layers were seen to read all columns")
def test_a_prompt_s_last_column_alone_sees_the_whole_prompt(gemma4):
    """generate() leaves the other columns out of layers that read; padded rows, and the budget acts afterwards."""
    ids, sizes = prompt(2, 20), []
    mask = left_pad(ids, [20, 13])
    with torch.no_grad(), kvpatch.patched(gemma4, "h2o", 6) as patch:
        projection = gemma4.model.layers[5].self_attn.q_proj
        hook = projection.register_forward_hook(lambda module, args, out: sizes.append(out.shape[1]))
        try:
            whole = gemma4(ids, attention_mask=mask, past_key_values=patch.new_cache()).logits[:, -1]
            kept = generate(gemma4, ids, attention_mask=mask)
        finally:
            hook.remove()
        steps = [generate(gemma4, ids[b : b + 1, pad:]) for b, pad in ((0, 0), (1, 7))]
    assert sizes[:2] == [20, 1]
    torch.testing.assert_close(kept[1][:, 0], whole.float(), atol=1e-5, rtol=0)
    torch.testing.assert_close(kept[1], torch.cat([logits for _, logits in steps]), atol=1e-5, rtol=0)


def test_rows_of_a_padded_batch_are_as_alone(model):
    ids = prompt(2, 24)
    with torch.no_grad(), kvpatch.patched(model, "roco", 0.5):
        both = feed(model, ids, 18, left_pad(ids, [24, 17])).logits_BSV
        alone = feed(model, ids[1:, 7:], 11).logits_BSV
    torch.testing.assert_close(both[1:], alone, atol=1e-5, rtol=0)


def test_bytes_are_counted_once(gemma4):
    with kvpatch.patched(gemma4, "h2o", 6) as patch:
        gemma4.generate(prompt(1, 20), max_new_tokens=2, do_sample=False, pad_token_id=0)
        report = patch.report()
    sliding, full = (2 * 2 * size * 8 for size in (8, 16))  # keys and values of two heads in float64
    assert report.full_nbytes == 21 * full + 2 * 7 * sliding
    assert report.layers == (0, 1, 2) and report.readers == ((3, 1), (4, 2), (5, 1))
    assert report.to_dict()["readers"] == [[3, 1], [4, 2], [5, 1]]
    assert "3, 4, 5 use the keys of 1, 2, 1" in str(report)


def test_several_columns_each_see_what_was_held_then(model):
    """Drafts are read in one pass, each as a step; what is not accepted is taken back."""
    ids = prompt(1, 6).repeat(1, 4)
    for policy in ("h2o", "key_diff"):
        with kvpatch.patched(model, policy, 8):
            want = generate(model, ids)
            got = generate(model, ids, prompt_lookup_num_tokens=4)
        assert torch.equal(got[0], want[0])
        torch.testing.assert_close(got[1], want[1], atol=1e-5, rtol=0)


def test_rounded_and_merged_entries_are_the_source_s(gemma4):
    """A reader's output follows from what the source holds: with one layer's values gone it is another's."""
    ids = prompt(1, 20)
    with torch.no_grad():
        for policy, options in (("h2o", {"bits": 8}), (kvpatch.policies.merged(kvpatch.get_policy("h2o")), {})):
            with kvpatch.patched(gemma4, policy, 6, **options):
                near = feed(gemma4, ids, 14).logits_BSV
            with kvpatch.patched(gemma4, "h2o", 6):
                exact = feed(gemma4, ids, 14).logits_BSV
            torch.testing.assert_close(near[:, 0], exact[:, 0], atol=1e-5, rtol=0)  # a prompt is read in full
            assert 0 < (near[:, 1:] - exact[:, 1:]).abs().mean() < 0.5 * exact.std()


def test_copies_rows_and_files(gemma4, tmp_path):
    ids = prompt(2, 20)

    def run(cache, tokens):
        with torch.no_grad():
            return gemma4(tokens, past_key_values=cache).logits[:, -1]

    with kvpatch.patched(gemma4, "h2o", 6) as patch:
        cache, first = patch.new_cache(), patch.new_cache()
        run(cache, ids)
        run(first, ids[:1])
        patch.save_cache(cache, tmp_path / "cache.safetensors")
        copy, loaded, row = cache.clone(), patch.load_cache(tmp_path / "cache.safetensors"), cache.select_rows(1)
        joined = EvictingCache.concatenate([row.clone(), first])
        expected = run(cache, ids[:, :1])
        for other in (copy, loaded):
            torch.testing.assert_close(run(other, ids[:, :1]), expected, rtol=0, atol=0)
        torch.testing.assert_close(run(joined, ids[:, :1].flip(0)), expected.flip(0), rtol=0, atol=1e-6)
        assert cache.get_seq_length(5) == 21, "a reader's number is a layer's, too"


def test_record_and_replay(gemma4):
    text = prompt(2, 20)
    with kvpatch.patched(gemma4, "h2o", 8, record=True) as patch:
        logits = feed(gemma4, text, 15).logits_BSV
        record = patch.record()
    with kvpatch.replay(gemma4, record), torch.no_grad():
        torch.testing.assert_close(gemma4(text).logits[:, 14:], logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(gemma4(text, logits_to_keep=4).logits, logits[:, -4:], rtol=0, atol=1e-5)


def test_gradients_reach_the_source_s_keys(gemma4):
    """A training step inside the block is the model's own; a prompt's graph under a budget goes through the readers."""
    ids = prompt(1, 12)

    def gradient(**options):
        gemma4.zero_grad()
        gemma4(ids, **options).logits[:, -1].square().mean().backward()
        return gemma4.model.layers[1].self_attn.k_proj.weight.grad.clone()

    want = gradient(use_cache=False)
    with kvpatch.patched(gemma4, "h2o", 6) as patch:
        assert torch.equal(gradient(use_cache=False), want)
        torch.testing.assert_close(gradient(past_key_values=patch.new_cache()), want, atol=1e-8, rtol=1e-5)
    gemma4.zero_grad()


@batches
def test_what_cannot_be_is_refused(gemma4):
    with pytest.raises(kvpatch.KVPatchError, match="block=4: in this model layers use the keys of layers before them"):
        kvpatch.patch(gemma4, "h2o", 6, block=4)
    with kvpatch.patched(gemma4, "h2o", 6) as patch:
        with pytest.raises(kvpatch.KVPatchError, match="leave compile_config out"):
            gemma4.generate(prompt(1, 8), max_new_tokens=2, compile_config=CompileConfig())
        with pytest.raises(kvpatch.KVPatchError, match="not captured"):
            patch.graph(gemma4)
        with pytest.raises(kvpatch.KVPatchError, match="layers that use others' keys, cannot be read from: use generate"):
            gemma4.init_continuous_batching()


def test_keys_of_all_tokens_are_not_handed_out(gemma4):
    ids, asked = torch.randint(1, gemma4.config.vocab_size, (1, 12)), {"return_shared_kv_states": True}
    with torch.no_grad(), kvpatch.patched(gemma4, "h2o", 0.5):
        past = gemma4(ids).past_key_values
        with pytest.raises(kvpatch.KVPatchError, match="no pass has the keys and values of all tokens"):
            gemma4(ids[:, :1], past_key_values=past, **asked)
    with torch.no_grad(), kvpatch.patched(gemma4, "h2o", 1.0):
        past = gemma4(ids, **asked).past_key_values
        shown = gemma4(ids[:, :1], past_key_values=past, **asked).shared_kv_states
    assert shown["full_attention"][0].shape[2] == 13


def test_a_reader_without_a_source_is_refused(gemma4):
    module = gemma4.model.layers[5].self_attn
    with pytest.raises(kvpatch.KVPatchError, match="no module says that it stores them for layers of type 'full_attention'"):
        source_of(module, [module])
