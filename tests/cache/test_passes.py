"""One pass over a text: prompts and generated tokens told apart, padding, and tokens that the user protects."""

import pytest
import torch

import kvpatch
from kvpatch.cache.forward_context import Forward
from tests.helpers.running import N, kept, read
from tests.helpers.tiny import make, prompt

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture(scope="module")
def model():
    return make("llama_gqa")


def test_prompts_are_counted(model):
    """A prompt may be one token, and may be fed one by one; the next tokens evict."""
    with kvpatch.patched(model, "h2o", 4) as handle:
        cache = handle.new_cache()
        for t in range(12):
            model(prompt(2, N)[:, t : t + 1], past_key_values=cache)
            assert cache.turns.prompts_read == 1
        assert cache.held(0).unique().tolist() == [4]
        model(prompt(2, 5, seed=2), past_key_values=cache)
        assert (cache.turns.prompts_read, cache.turns.unfinished) == (2, False)
        model(prompt(2, 2, seed=2), past_key_values=cache)
        assert cache.turns.prompts_read == 3
        whole, pieces = handle.new_cache(), handle.new_cache()
        mask = torch.ones(2, N, dtype=torch.long)
        mask[1, :4] = 0
        model(prompt(2, N), attention_mask=mask, past_key_values=whole)
        pieces.plans.prompt_len = N
        for t in range(N):
            model(prompt(2, N)[:, t : t + 1], attention_mask=mask[:, : t + 1], past_key_values=pieces)
        for layer in range(2):
            assert torch.equal(whole.positions(layer).sort().values[..., -4:], pieces.positions(layer).sort().values[..., -4:])


def test_padding_has_position_minus_one(model):
    mask = torch.ones(2, N, dtype=torch.long)
    mask[1, :4] = 0
    with kvpatch.patched(model, "h2o", 0.5) as handle:
        cache = handle.new_cache()
        model(prompt(2, N), attention_mask=mask, past_key_values=cache)
    assert cache.now.positions_BQ.tolist() == [list(range(N)), [-1] * 4 + list(range(N - 4))]


def test_padding_among_generated_tokens_beside_a_prompt_s_end_is_refused():
    """It was refused only in passes of generated tokens alone; here it failed with an IndexError inside the first layer."""
    model, mask = make("llama_gqa"), torch.tensor([[1, 1, 1, 1, 1, 1, 0]])
    with torch.no_grad(), kvpatch.patched(model, "h2o", 0.5) as patch:
        cache = patch.new_cache()
        cache.plans.prompt_len = 5
        with pytest.raises(kvpatch.KVPatchError, match="marks a generated token as padding"):
            model(prompt(1, 7), attention_mask=mask, past_key_values=cache)
        assert not cache.unfinished and cache.get_seq_length() == 0


def test_a_protecting_mask_is_that_of_every_sequence_of_a_prompt(model):
    protect = torch.zeros(2, N, dtype=torch.bool)
    protect[0, 3:6] = protect[1, 8:10] = True
    with kvpatch.patched(model, "window", 8, protect=protect) as handle:
        cache = handle.new_cache()
        model(prompt(2, N).repeat_interleave(2, 0), past_key_values=cache)
    held = [set(row[0].tolist()) - {-1} for row in cache.positions(0)]
    assert held == [{3, 4, 5, *range(15, 20)}] * 2 + [{8, 9, *range(14, 20)}] * 2


def test_a_protecting_mask_is_of_the_prompt_alone(model):
    """A pass may bring its last tokens and some generated ones."""
    with kvpatch.patched(model, "window", 8, protect=torch.arange(N) == 2) as handle:
        cache = handle.new_cache()
        cache.plans.prompt_len = N
        for piece in prompt(2, N + 4).split([17, 7], 1):
            model(piece, past_key_values=cache)
    assert set(cache.positions(0)[0, 0].tolist()) - {-1} == {2, *range(17, 24)}


def test_a_protecting_mask_is_not_of_what_other_rows_read_later(model):
    """A later prompt of a row that has left the batch, or of one more, was an error of torch."""
    with kvpatch.patched(model, "window", 8, protect=(torch.arange(N) == 2).expand(2, -1)) as handle:
        cache = handle.new_cache()
        model(prompt(2, N), past_key_values=cache)
        for rows in (cache.select_rows(1), kvpatch.EvictingCache.concatenate([cache, cache.select_rows(0)])):
            model(prompt(len(rows.positions(0)), 5), past_key_values=rows)
            assert [set(row[0].tolist()) - {-1} for row in rows.positions(0)] == [{2, *range(18, 25)}] * len(rows.positions(0))
        cache = handle.new_cache()
        cache.plans.prompt_len = N
        model(prompt(2, 9), past_key_values=cache)
        cache.batch_select_indices(torch.tensor([0]))
        with pytest.raises(kvpatch.KVPatchError, match="mask of shape"):
            model(prompt(1, 9), past_key_values=cache)


def test_protected_ids_are_kept_wherever_they_stand(model):
    """Padding of that id is not."""
    ids, mask = prompt(2, N), torch.ones(2, N, dtype=torch.long)
    ids[ids == 5] = 6
    ids[0, [0, 3, 9]] = ids[1, [0, 1, 7]] = 5
    mask[1, :2] = 0
    with kvpatch.patched(model, "window", 8, protect=[5]) as handle:
        cache = handle.new_cache()
        model(ids, attention_mask=mask, past_key_values=cache)
    held = [set(row[0].tolist()) - {-1} for row in cache.positions(0)]
    assert held == [{0, 3, 9, *range(15, 20)}, {5, *range(11, 18)}]


def test_what_is_protected_twice_is_protected(model):
    """One of them by its place at the text's start and by the user."""
    protect = torch.zeros(N, dtype=torch.bool)
    protect[[0, 4]] = True
    cache = read(model, "window", 8, sinks=2, protect=protect)
    assert set(cache.positions(0)[0, 0].tolist()) - {-1} == {0, 1, 4, *range(15, 20)}


def test_layers_with_other_numbers_of_heads_have_columns_of_their_own():
    now = Forward(torch.zeros(1, 1, dtype=torch.long), 0, False)
    for H in (2, 4, 2):
        assert now.index_column(3, torch.zeros(1, H, 5, dtype=torch.long)).tolist() == [[3] * H]


@pytest.mark.parametrize("turns", [0, 1])
def test_a_prompt_that_was_left_open_ends_with_a_single_token(model, turns):
    """A generate() that is interrupted between two pieces of a later turn's prompt left layers that never evicted again."""
    whole, last = prompt(1, 12, seed=2), prompt(1, 1, seed=3)
    with kvpatch.patched(model, "h2o", 8) as patch:
        cache, want = patch.new_cache(), patch.new_cache()
        for one in [cache, want] * turns:
            model(prompt(1, N), past_key_values=one)
        cache.plans.prompt_len = cache.columns_read + 20
        model(whole, past_key_values=cache)
        assert cache.turns.unfinished
        cache.plans.prompt_len = None
        model(last, past_key_values=cache)
        model(torch.cat([whole, last], 1), past_key_values=want)
        assert not cache.turns.unfinished and cache.turns.prompts_read == turns + 1
        cache.check_invariants()
        assert kept(cache) == kept(want)
