"""Several texts in one row, which transformers tells apart by position_ids that begin anew, are refused under a budget."""

import pytest
import torch

import kvpatch
from tests.helpers.tiny import make, prompt

IDS = prompt(1, 24)
ANEW = torch.cat([torch.arange(10), torch.arange(14)])[None]
LENGTHS = torch.tensor([0, 10, 24], dtype=torch.int32)
WORDS = r"position_ids begin anew within a row.*packing=False and padding_free=False.*'wrapped'"


@pytest.mark.parametrize("options", [{"position_ids": ANEW}, {"cu_seq_lens_q": LENGTHS, "cu_seq_lens_k": LENGTHS}], ids=list)
@pytest.mark.parametrize("training", [True, False])
def test_texts_that_are_packed_into_a_row_are_refused(training, options):
    model = make("llama_gqa").train(training)
    with kvpatch.patched(model, "window", 8, block=4):
        with pytest.raises(kvpatch.KVPatchError, match=WORDS):
            model(IDS, labels=IDS, use_cache=False, **options)
        model(IDS, labels=IDS, use_cache=False)


def test_a_replay_refuses_them_too():
    model = make("llama_gqa").eval()
    with kvpatch.patched(model, "window", 8, record=True) as patch, torch.no_grad():
        model(IDS, use_cache=True)
        with patch.replay(patch.record()):
            model(IDS)
            with pytest.raises(kvpatch.KVPatchError, match=WORDS):
                model(IDS, position_ids=ANEW)


def test_without_block_they_are_the_models_own():
    model = make("llama_gqa").train()
    want = model(IDS, labels=IDS, position_ids=ANEW, use_cache=False).loss
    assert not torch.equal(want, model(IDS, labels=IDS, use_cache=False).loss)
    with kvpatch.patched(model, "window", 8):
        assert torch.equal(model(IDS, labels=IDS, position_ids=ANEW, use_cache=False).loss, want)


def test_positions_that_go_on_and_masks_of_padding_are_taken():
    model, mask = make("llama_gqa").train(), torch.ones_like(IDS)
    mask[:, :5] = 0
    with kvpatch.patched(model, "window", 8, block=4):
        model(IDS, position_ids=torch.arange(24)[None] + 3, use_cache=False)
        model(IDS, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0), use_cache=False)


def test_at_one_a_pass_with_a_cache_reads_them_as_the_unpatched_model_does():
    model = make("llama_gqa").eval()
    want = model(IDS, position_ids=ANEW).logits
    with kvpatch.patched(model, "window", 1.0):
        torch.testing.assert_close(model(IDS, position_ids=ANEW).logits, want, atol=3e-5, rtol=0)
    with kvpatch.patched(model, "window", 1.0, block=4), pytest.raises(kvpatch.KVPatchError, match=WORDS):
        model(IDS, position_ids=ANEW, use_cache=False)
