"""Patch.compress: a prompt that was read before the block is kept as one that was read inside it."""

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

import kvpatch
from kvpatch.cache import passes
from tests.helpers.comparing import SMALL
from tests.helpers.running import go_on, kept
from tests.helpers.tiny import left_pad, make, prompt

pytestmark = pytest.mark.usefixtures("no_gradients")
IDS = prompt(2, 30)
POLICIES = ("window", "streaming_llm", "random", "key_norm", "key_diff", "cur", "lag_kv", "leverage", "kvzip", "kvzip_plus")
COMBINED = ("adaptive(key_norm)", "global_topk(key_diff)")


@pytest.fixture(scope="module")
def model():
    return make("llama_gqa", dtype=torch.float64)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("policy", [*POLICIES, *COMBINED])
def test_what_was_read_before_the_block_is_kept_as_if_it_were_read_inside(model, policy, padded):
    mask = left_pad(IDS, [30, 19]) if padded else None
    at = {} if mask is None else {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    past = model(IDS, **at).past_key_values
    with kvpatch.patched(model, policy, 0.4, **SMALL.get(policy, {})) as patch:
        want = patch.new_cache()
        model(IDS, **at, past_key_values=want)
        got = patch.compress(past, IDS if "kvzip" in policy else None, attention_mask=mask)
        got.check_invariants()
        assert kept(got) == kept(want)
        assert got.nbytes == want.nbytes
        more = prompt(2, 6, seed=2)
        theirs, mine = go_on(model, more, want)[0], go_on(model, more, got)[0]
        torch.testing.assert_close(mine, theirs)
        assert kept(got) == kept(want)
    assert past.get_seq_length() == 30


@pytest.mark.parametrize("bits", [8, 4])
def test_padding_behind_tokens_leaves_a_window_its_tokens(bits):
    """Columns with gaps passed for consecutive ones, so that a sliding window ended in the padding."""
    sliding, more = make("mistral_sliding", dtype=torch.float64), prompt(2, 6, seed=2)
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, 6:] = 0
    whole = torch.cat([mask, torch.ones_like(more)], 1)
    at = (whole.cumsum(1) - 1).clamp(min=0)
    with kvpatch.patched(sliding, "full"):
        past = sliding(IDS, attention_mask=mask, position_ids=at[:, :30]).past_key_values
    with kvpatch.patched(sliding, "full", bits=bits) as patch:
        want = patch.new_cache()
        sliding(IDS, attention_mask=mask, position_ids=at[:, :30], past_key_values=want)
        caches = want, patch.compress(past, attention_mask=mask)
        theirs, mine = (
            sliding(more, attention_mask=whole, position_ids=at[:, 30:], past_key_values=one).logits for one in caches
        )
        torch.testing.assert_close(mine, theirs)


def test_what_was_read_before_the_block_is_rolled_back_to_its_padding_at_most(model):
    """Columns of padding were taken back like tokens, of which the shorter row then had fewer than none."""
    mask = left_pad(IDS, [30, 4])
    past = model(IDS, attention_mask=mask).past_key_values
    with kvpatch.patched(model, "full") as patch:
        cache = patch.compress(past, attention_mask=mask)
        with pytest.raises(kvpatch.KVPatchError, match="Cannot roll back 5 tokens"):
            cache.crop(-5)
        cache.crop(-3)
        cache.check_invariants()
        assert cache.held(0).unique(dim=1).tolist() == [[27], [1]]


def test_padding_behind_tokens_that_was_read_before_the_block_is_no_text():
    """MPT's positions count such columns, the text does not."""
    model = make("mpt")
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, 20:] = 0
    past = model(IDS, attention_mask=mask).past_key_values
    with kvpatch.patched(model, "full") as patch:
        want = patch.new_cache()
        model(IDS, attention_mask=mask, past_key_values=want)
        got = patch.compress(past, attention_mask=mask)
    assert got.lengths_B.tolist() == want.lengths_B.tolist() == [30, 30]
    assert got.read_B.tolist() == want.read_B.tolist() == [30, 20]


def test_a_cache_that_contradicts_itself_is_noticed(model, monkeypatch):
    def spoiled(cache):
        finish(cache)
        cache.layers[1].positions[0, 0, :2] = 0

    finish, past = passes.end_pass, model(IDS).past_key_values
    with kvpatch.patched(model, "window", 0.4, strict=True) as patch:
        patch.compress(past)
        monkeypatch.setattr(passes, "end_pass", spoiled)
        with pytest.raises(kvpatch.KVPatchError, match="contradicts itself: layer 1: a head holds a token twice"):
            patch.compress(past)


@pytest.mark.parametrize("name", ["gpt2", "mpt"])
def test_architectures(name):
    model = make(name, dtype=torch.float64)
    past = model(IDS).past_key_values
    with kvpatch.patched(model, "key_diff", 9) as patch:
        want = patch.new_cache()
        model(IDS, past_key_values=want)
        got = patch.compress(past)
        assert kept(got) == kept(want)
        mine, theirs = (go_on(model, prompt(2, 4, seed=2), cache)[0] for cache in (got, want))
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)  # MPT's own code computes ALiBi in float32


def test_a_cache_under_full(model):
    mask = left_pad(IDS, [30, 19])
    with kvpatch.patched(model, "full") as patch:
        past = patch.new_cache()
        model(IDS, attention_mask=mask, past_key_values=past)
        go_on(model, prompt(2, 3, seed=2), past)
    with kvpatch.patched(model, "key_diff", 0.4) as patch:
        cache = patch.compress(past)
        assert cache.get_seq_length() == 33
        assert [[len(head) for head in row] for row in kept(cache)[0]] == [[13, 13], [8, 8]]
    assert past.held(0).unique().tolist() == [22, 33]


def test_generate_goes_on_from_it(model):
    past, text = model(IDS).past_key_values, torch.cat([IDS, prompt(2, 4, seed=2)], 1)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with kvpatch.patched(model, "kvzip", 0.5, chunk=12) as patch:
        want = patch.new_cache()
        model(IDS, past_key_values=want)
        got = patch.compress(past, IDS)
        assert torch.equal(model.generate(text, past_key_values=got.clone(), **options),
                           model.generate(text, past_key_values=want.clone(), **options))  # fmt: skip
        with pytest.raises(kvpatch.KVPatchError, match="input_ids differ from what the cache has read"):
            model.generate(text.flip(1), past_key_values=got)


def test_what_to_type_instead(model):
    past = model(IDS).past_key_values
    refused = {
        "snapkv": "it scores tokens by the attention or the queries",
        "expected_attention": "it scores tokens by the attention or the queries",
        "critical(key_attention)": "Run the prompt inside the block",
        "kvzip": r"patch.compress\(past, ids\)",
    }
    for policy, why in refused.items():
        with kvpatch.patched(model, policy, 0.5) as patch, pytest.raises(kvpatch.KVPatchError, match=why):
            patch.compress(past)
    with kvpatch.patched(model, "key_diff", 9, block=4) as patch, pytest.raises(kvpatch.KVPatchError, match="leave block out"):
        patch.compress(past)
    slides = make("mistral_sliding", dtype=torch.float64)
    dropped = slides(IDS).past_key_values
    with (
        kvpatch.patched(slides, "key_diff", 9) as patch,
        pytest.raises(kvpatch.KVPatchError, match="no longer holds every") as e,
    ):
        patch.compress(dropped)
    assert "into DynamicCache(), without config=" in str(e.value)
    whole = slides(IDS, past_key_values=DynamicCache()).past_key_values  # as the error advises
    with kvpatch.patched(slides, "key_diff", 9) as patch:
        assert patch.compress(whole).get_seq_length() == IDS.shape[1]
    with kvpatch.patched(model, "key_diff", 0.5) as patch:
        own = patch.compress(past)
        for wrong, why in ((own, "may have dropped tokens"), (DynamicCache(), "has read nothing"), ((), "give a DynamicCache")):
            with pytest.raises(kvpatch.KVPatchError, match=why):
                patch.compress(wrong)
        pair = EncoderDecoderCache(past, DynamicCache())
        for call in (patch.compress, patch.new_cache, lambda given: model.generate(IDS, past_key_values=given)):
            with pytest.raises(kvpatch.KVPatchError, match="give a DynamicCache"):
                call(pair)
        with pytest.raises(kvpatch.KVPatchError, match=r"attention_mask is \[2, 29\]: give the tensor \[2, 30\]"):
            patch.compress(past, attention_mask=torch.ones(2, 29))
        with pytest.raises(kvpatch.KVPatchError, match="attention_mask holds 0.5"):
            patch.compress(past, attention_mask=torch.full((2, 30), 0.5))
        with pytest.raises(kvpatch.KVPatchError, match=r"ids is a list: give the tensor"):
            patch.compress(past, IDS.tolist())
    outside = kvpatch.patched(model, "kvzip", 0.5)
    with outside as patch:
        pass
    with pytest.raises(kvpatch.KVPatchError, match=r"call compress\(\) inside the block"):
        patch.compress(past, IDS)


def test_a_second_reading_of_a_cache_whose_positions_count_padding_follows_them(model):
    mask = left_pad(IDS, [30, 19])
    with kvpatch.patched(model, "full"):
        past = model(IDS, attention_mask=mask).past_key_values
    with kvpatch.patched(model, "kvzip", 0.4, **SMALL["kvzip"]) as patch:
        want = model(IDS, attention_mask=mask, past_key_values=patch.new_cache()).past_key_values
        assert kept(patch.compress(past, IDS)) == kept(want)


@pytest.mark.parametrize("how", ["compress", "new_cache"])
def test_a_filled_cache_knows_where_its_padding_lies(how):
    """A mask was ignored that shows padding where `past` was said to have none, and refused from the second pass on if told."""
    model, ids = make("llama_gqa"), prompt(2, 30)
    mask = torch.ones(2, 33, dtype=torch.long)
    mask[1, :10] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    past = model(ids, attention_mask=mask[:, :30], position_ids=places[:, :30], past_key_values=DynamicCache()).past_key_values
    given = [{"attention_mask": mask[:, : n + 1], "position_ids": places[:, n : n + 1]} for n in range(30, 33)]
    with kvpatch.patched(model, "key_diff", 10) as patch:
        blind = getattr(patch, how)(past)
        with pytest.raises(kvpatch.KVPatchError, match="has padding at column 0 of row 1, where the cache has read a token"):
            model(ids[:, :1], past_key_values=blind, **given[0])
        told, inside = patch.compress(past, attention_mask=mask[:, :30]), patch.new_cache()
        model(ids, attention_mask=mask[:, :30], position_ids=places[:, :30], past_key_values=inside)
        for more in given:
            got, want = (model(ids[:, :1], past_key_values=cache, **more).logits for cache in (told, inside))
            torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
