"""A prompt that is read in blocks: what cannot be computed is refused, and a loss sees what is evicted."""

import pytest
import torch

import kvpatch
from tests.helpers.running import kept
from tests.helpers.tiny import force, left_pad, make, prompt


def test_attention_dropout_is_refused_while_training():
    """It would be left out in silence: the probabilities it acts on are gone when the output is there."""
    model, ids = make("gpt2"), prompt(1, 20)
    model.train()
    with kvpatch.patched(model, "h2o", 5, block=4):
        with pytest.raises(kvpatch.KVPatchError, match=r"attention dropout of 0\.1.*attn_pdrop"):
            model(ids)
        model.eval()
        assert torch.isfinite(model(ids, use_cache=False).logits).all()


def test_the_loss_sees_the_eviction():
    model, ids = make("llama_gqa"), prompt(1, 60)
    model.train()
    full = model(ids, labels=ids).loss
    with kvpatch.patched(model, "window", 20, block=10):
        evicted = model(ids, labels=ids).loss
    with kvpatch.patched(model, "window", 1.0, block=10):
        same = model(ids, labels=ids).loss
    assert abs(evicted - full) > 1e-3
    torch.testing.assert_close(same, full, atol=1e-5, rtol=0)


def test_blocks_of_a_later_turn_count_each_row_s_own_tokens():
    """Of a shorter question beside a longer one; each row is as alone."""
    model, ids, more, fed = make("llama_gqa"), prompt(2, 20), prompt(2, 12, seed=2), prompt(2, 3, seed=3)
    mask = torch.cat([torch.ones_like(ids), left_pad(more, [12, 7])], 1)
    with kvpatch.patched(model, "h2o", 9, block=5):
        together, cache = force(model, more, fed, mask, force(model, ids, ids[:, :0])[1])
        for row, n in enumerate((12, 7)):
            before = force(model, ids[row : row + 1], ids[:1, :0])[1]
            alone, one = force(model, more[row : row + 1, -n:], fed[row : row + 1], cache=before)
            torch.testing.assert_close(together[row], alone[0], atol=3e-5, rtol=0)
            assert [layer[row] for layer in kept(cache)] == [layer[0] for layer in kept(one)]


def test_marked_tokens_of_a_padded_prompt_are_kept_as_of_the_row_alone():
    model, ids, lengths = make("llama_gqa"), prompt(2, 40), (40, 29)
    marked = [int(ids[0, 5]), int(ids[1, 25])]
    with kvpatch.patched(model, "h2o", 12, block=8, protect=marked):
        together = kept(force(model, ids, ids[:, :0], left_pad(ids, list(lengths)))[1])
        for row, n in enumerate(lengths):
            alone = kept(force(model, ids[row : row + 1, -n:], ids[:1, :0])[1])
            assert [layer[row] for layer in together] == [layer[0] for layer in alone]
            places = {p for p, token in enumerate(ids[row, -n:].tolist()) if token in marked}
            assert places and all(places <= set(head) for layer in alone for head in layer[0])
