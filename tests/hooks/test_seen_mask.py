"""A mask says of columns that the cache has read what was said when it read them, or is refused.

https://github.com/huggingface/transformers/issues/34232 (a batch's second turn, where rows ended early),
https://github.com/huggingface/transformers/issues/18104 (padding between turns)
"""

import pytest
import torch
from transformers import DynamicCache

import kvpatch
from tests.helpers.tiny import make, prompt

pytestmark = pytest.mark.usefixtures("no_gradients")
IDS, NEW = prompt(2, 20), prompt(2, 3, seed=4)


def generate(model, ids, **options):
    return model.generate(ids, **{"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **options})


@pytest.mark.parametrize("k", [0.5, 60, 1.0])
@pytest.mark.parametrize(("count", "pads"), [(1, 0), (3, 0), (1, 4)])
def test_a_pass_that_hides_a_token_is_refused(k, count, pads):
    model = make("llama_gqa")
    mask = torch.ones(2, 20 + count, dtype=torch.long)
    mask[1, :pads] = 0
    with kvpatch.patched(model, "h2o", k) as patch:
        cache = patch.new_cache()
        model(IDS, attention_mask=mask[:, :20], past_key_values=cache)
        mask[1, pads + 3] = 0
        words = rf"has padding at column {pads + 3} of row 1, where .* a token.*cache\.forget\(\[\(3, 4\)\], row=1\)"
        with pytest.raises(kvpatch.KVPatchError, match=words):
            model(NEW[:, :count], attention_mask=mask, past_key_values=cache)
        assert cache.get_seq_length() == 20
        if k != 1.0:
            cache.forget([(3, 4)], row=1)  # what the words say; then such a mask is right, and one of ones too
        mask[1, pads + 3] = k == 1.0
        model(NEW[:, :count], attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize("k", [0.5, 1.0])
def test_a_pass_that_shows_padding_is_refused(k):
    model = make("llama_gqa")
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :5] = 0
    with kvpatch.patched(model, "h2o", k) as patch:
        cache = patch.new_cache()
        model(IDS, attention_mask=mask, past_key_values=cache)
        words = r"^(?!.*cache\.forget).*has a token at column 0 of row 0, where the cache has read padding"
        with pytest.raises(kvpatch.KVPatchError, match=words):
            model(NEW[:, :1], attention_mask=torch.ones(2, 21, dtype=torch.long), past_key_values=cache)
        model(NEW[:, :1], attention_mask=torch.cat([mask, mask[:, -1:]], 1), past_key_values=cache)


def second_turn(model, cache, **options):
    """A batch of which row 0 has ended early, so that pad tokens stand behind its answer, and what comes next."""
    stop = int(generate(model, IDS)[0, 22])
    said = generate(model, IDS, past_key_values=cache, eos_token_id=stop)
    assert said[0, 23:].eq(0).all()
    whole = torch.cat([said, NEW], 1)
    return generate(model, whole, past_key_values=cache, **{name: one(whole) for name, one in options.items()})[
        :, whole.shape[1] :
    ]


@pytest.mark.parametrize("k", [60, 1.0])
def test_a_batch_of_which_a_row_ended_early(k):
    """Without a mask transformers makes one, in which pad tokens are padding."""
    model = make("llama_gqa", dtype=torch.float64)
    want = second_turn(model, DynamicCache(config=model.config), attention_mask=torch.ones_like)
    assert not torch.equal(want, second_turn(model, DynamicCache(config=model.config)))
    with kvpatch.patched(model, "h2o", k) as patch:
        assert torch.equal(second_turn(model, patch.new_cache(), attention_mask=torch.ones_like), want)
        for asked in ({}, {"attention_mask": lambda ids: ids.ne(0).long()}):
            with pytest.raises(
                kvpatch.KVPatchError, match="has padding at column 23 of row 0.*with ones for what was generated"
            ):
                second_turn(model, patch.new_cache(), **asked)


@pytest.mark.parametrize(
    ("columns", "new", "words"),
    [
        (
            20,
            1,
            r"has 20 columns, but 20 tokens were seen and 1 are given: give 21 over both\. If the token is the last that was",
        ),
        (20, 3, r"20 tokens were seen and 3 are given: give 23 over both\.$"),
        (24, 22, r"20 tokens were seen and 22 are given: give 22, or 42 over both\.$"),
    ],
)
def test_a_mask_of_other_columns(columns, new, words):
    """The last token again under the mask of what was seen: https://github.com/huggingface/transformers/pull/47597"""
    model, ids = make("llama_gqa"), torch.cat([IDS, NEW], 1)[:, -new:]
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        cache = patch.new_cache()
        model(IDS, past_key_values=cache)
        with pytest.raises(kvpatch.KVPatchError, match=words):
            generate(model, ids, attention_mask=torch.ones(2, columns, dtype=torch.long), past_key_values=cache)
