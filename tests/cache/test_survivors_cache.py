"""Small laws of a cache's counters, written down because the code could be changed without them (mutation testing)."""

import contextlib
import copy
import dataclasses
import inspect
from types import SimpleNamespace

import pytest
import torch

import kvpatch
from kvpatch import KVPatchError
from kvpatch.attention.stacked import Deck
from kvpatch.cache import compiled, from_dynamic, passes
from kvpatch.cache.settings import CacheSettings
from kvpatch.policies import get_policy
from kvpatch.policies.budgets import Budget
from tests.helpers.tiny import make, prompt

N = 20
pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture(scope="module")
def model():
    return make("llama_gqa")


def read(model, policy, k, steps=0, record=False, room=None, **options):
    """A cache that has read a prompt of N tokens and so many more, and its patch, which is gone."""
    with kvpatch.patched(model, policy, k, **options) as handle:
        cache = handle.new_cache(**({} if room is None else {"room": room}))
        if record:
            cache.activate_past_recording()
        model(prompt(2, N), past_key_values=cache)
        for t in range(steps):
            model(prompt(2, 9, seed=3)[:, t : t + 1], past_key_values=cache)
    return cache


def test_a_temperature_that_is_traced_goes_by_the_clock(model):
    """What torch.compile sees of a step has no Python number in it; Python's own counters are then behind."""
    cache = read(model, "keyformer", 0.5, steps=2, tau=(1.0, 3.0), generation_length=8)
    assert (cache.counters.device.steps.item(), cache.counters.device.span.item()) == (2, 8)
    cache.now = SimpleNamespace(traced=True, first_step=99)
    assert cache.temperature(0).item() == 1.5
    assert cache.temperature(2).item() == 2.0
    cache.counters.lag_B = torch.tensor([0.0, 2.0])
    assert cache.temperature(2).tolist() == [2.0, 1.5]
    cache.now.traced, cache.now.first_step = False, 4
    assert cache.temperature(2).tolist() == [2.5, 2.0]
    cache.counters.lag_B, cache.counters.device = None, None
    assert cache.temperature(2) == 2.5
    cache.now.traced = True  # before there is a clock
    assert cache.temperature(2) == 2.5


@pytest.mark.parametrize(("policy", "room", "limit"), [("h2o", None, 0), ("h2o", 6, 0), ("snapkv", 6, N + 6)])
def test_the_clock_of_a_cache(model, policy, room, limit, monkeypatch):
    """columns, limit, steps and span, which a compiled step reads; marked as standing still where there is room."""
    marked, mark = [], compiled.mark
    monkeypatch.setattr(compiled, "mark", lambda cache: (marked.append(cache), mark(cache)))
    cache = read(model, policy, 0.5, room=room)
    clock = cache.counters.device
    assert [one.item() for one in (clock.columns, clock.limit, clock.steps, clock.span)] == [N, limit, 0, 1]
    assert len(marked) == (room is not None)
    cache = read(model, policy, 0.5, steps=3, room=room)
    assert len(marked) == 2 * (room is not None)
    device = cache.counters.device
    assert [one.item() for one in (device.columns, device.limit, device.steps)] == [N + 3, limit, 3]


def test_a_ragged_layer_says_how_far_it_may_grow(model):
    with kvpatch.patched(model, "adakv", 0.4, window=5) as handle:
        cache = handle.new_cache()
        for turn in (1, 2):
            model(prompt(2, N), past_key_values=cache)
            slack = min(layer.slack for layer in cache.layers)
            assert slack > 0
            assert cache.counters.device.limit.item() == turn * N + slack


def test_layers_that_bound_themselves_always_act():
    """By their sliding window, whatever the policy of the others does."""
    for name, acting in (("h2o", [True, True]), ("full", [False, True])):
        cache = kvpatch.EvictingCache(CacheSettings(get_policy(name), Budget((0.5, 0.5)), bounds=(None, 4)))
        assert list(cache.settings.evicts) == acting
        assert [policy.name for policy in cache.settings.policies] == [name, "window"]


def test_steps_that_are_rolled_back_were_not_taken(model):
    cache = read(model, "h2o", 0.5, steps=3, record=True)
    cache.crop(-2)
    assert (cache.counters.steps, cache.stack, cache.stack_due) == (1, None, False)
    cache.crop(-1)
    assert cache.counters.steps == 0


def test_a_shared_score_is_rolled_back(model):
    options = {"shared": True, "noise": "none"}
    cache, want = (read(model, "keyformer", 0.5, steps, record=True, **options) for steps in (3, 1))
    assert not torch.equal(cache.shared[..., : N + 1], want.shared[..., : N + 1])
    cache.crop(-2)
    torch.testing.assert_close(cache.shared[..., : N + 1], want.shared[..., : N + 1])


def test_layers_stand_side_by_side_in_one_deck(model, monkeypatch):
    """Made once, at the first step after a prompt."""
    made, of = [], Deck.of
    monkeypatch.setattr(Deck, "of", lambda *given: made.append(of(*given)) or made[-1])
    cache = read(model, "h2o", 0.5, steps=4)
    assert len(made) == 1
    assert cache.stack is made[0]
    assert not cache.stack_due


def test_one_token_behind_a_prompt_is_not_recorded(model):
    """In the pass that ends it: a journal costs memory, and is what activate_past_recording() is for."""
    with kvpatch.patched(model, "h2o", 0.5) as handle:
        for extra, held in ((1, 0), (2, 2)):
            cache = handle.new_cache()
            cache.request.prompt_len = N
            model(prompt(2, N + extra), past_key_values=cache)
            assert [len(layer.journal) for layer in cache.layers] == [held] * len(cache.layers)
    with pytest.raises(KVPatchError, match="was not recorded"):
        read(model, "h2o", 0.5, steps=1).crop(-1)


def test_a_copy_made_in_inference_mode_can_be_written(model):
    cache = read(model, "h2o", 0.5, steps=1)
    with torch.inference_mode():
        new = copy.deepcopy(cache)
    assert not any(one.is_inference() for one in (new.seen_B, new.layers[0].keys, new.layers[0].positions))


def test_before_anything_was_read(model):
    cache = kvpatch.EvictingCache(CacheSettings(get_policy("keyformer"), Budget((0.5, 0.5))))
    assert (cache.settings.seed, cache.counters.steps, cache.turns.count, cache.get_seq_length()) == (0, 0, 0, 0)
    assert inspect.signature(passes.begin).parameters["repeatable"].default is False
    assert (cache.scratch, cache.stack_due) == (False, False)
    assert (cache.settings.block, cache.settings.renumbered, cache.turns.open) == (None, False, False)
    assert (cache.rows.joined, cache.rows.padded) == (False, False)


def test_reset_starts_anew(model):
    cache = read(model, "h2o", 0.5, steps=2)
    cache.reset()
    assert (cache.stack, cache.stack_due) == (None, False)
    assert (cache.counters.steps, cache.turns.count, cache.turns.open) == (0, 0, False)
    assert (cache.get_seq_length(), cache.seen_B) == (0, None)


def test_two_generated_tokens_at_once_are_refused_where_layers_share_a_score(model):
    with kvpatch.patched(model, "keyformer", 0.5, shared=True) as handle:
        for extra in (0, 1):
            cache = handle.new_cache()
            cache.request.prompt_len = N
            model(prompt(2, N + extra), past_key_values=cache)
        for extra in (2, 3):
            cache = handle.new_cache()
            cache.request.prompt_len = N
            with pytest.raises(KVPatchError, match=f"{extra} generated tokens in one pass"):
                model(prompt(2, N + extra), past_key_values=cache)


def test_padding_has_position_minus_one(model):
    mask = torch.ones(2, N, dtype=torch.long)
    mask[1, :4] = 0
    with kvpatch.patched(model, "h2o", 0.5) as handle:
        cache = handle.new_cache()
        model(prompt(2, N), attention_mask=mask, past_key_values=cache)
    assert cache.now.positions_BQ.tolist() == [list(range(N)), [-1] * 4 + list(range(N - 4))]


def test_values_of_another_dtype_are_taken_as_the_cache_s(model):
    """As under autocast, which turns projections into half precision and leaves what rotary positions touch."""

    def run(change):
        with kvpatch.patched(model, "h2o", 0.5) as handle, contextlib.ExitStack() as hooks:
            cache = handle.new_cache()
            model(prompt(2, N), past_key_values=cache)
            for layer in model.model.layers:
                attn = layer.self_attn
                for hook in (
                    attn.v_proj.register_forward_hook(lambda module, given, out: change(out)),
                    attn.o_proj.register_forward_pre_hook(lambda module, given: (given[0].bfloat16().float(),)),
                ):
                    hooks.callback(hook.remove)
            return [model(prompt(2, n, seed=3), past_key_values=cache).logits for n in (1, 1, 5)]

    got, want = run(lambda out: out.bfloat16()), run(lambda out: out.bfloat16().float())
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_under_torch_compile_a_length_is_a_tensor(model, monkeypatch):
    cache = read(model, "h2o", 0.5, steps=1)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert cache.get_seq_length() is cache.counters.device.columns
    cache.counters.device = None
    assert cache.get_seq_length() == N + 1


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
        cache.request.prompt_len = N
        for piece in prompt(2, N + 4).split([17, 7], 1):
            model(piece, past_key_values=cache)
    assert set(cache.positions(0)[0, 0].tolist()) - {-1} == {2, *range(17, 24)}


def test_protected_ids_are_kept_wherever_they_stand(model):
    """And padding of that id is not."""
    ids, mask = prompt(2, N), torch.ones(2, N, dtype=torch.long)
    ids[ids == 5] = 6
    ids[0, [0, 3, 9]] = ids[1, [0, 1, 7]] = 5
    mask[1, :2] = 0
    with kvpatch.patched(model, "window", 8, protect=[5]) as handle:
        cache = handle.new_cache()
        model(ids, attention_mask=mask, past_key_values=cache)
    held = [set(row[0].tolist()) - {-1} for row in cache.positions(0)]
    assert held == [{0, 3, 9, *range(15, 20)}, {5, *range(11, 18)}]


def test_kernels_have_no_deck(model):
    pytest.importorskip("triton")
    cache = read(model, "h2o", 0.5, steps=2, backend="triton")
    assert cache.stack is None


CHANGES = {
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(1),
    "crop": lambda cache: cache.crop(-1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_in_inference_mode_leaves_a_cache_that_can_be_written(model, name):
    cache = read(model, "h2o", 0.5, steps=2, record=True)
    with torch.inference_mode():
        CHANGES[name](cache)
    tensors = [cache.seen_B, *(one for layer in cache.layers for one in (layer.keys, layer.positions, layer.state["sum"]))]
    assert not any(one.is_inference() for one in tensors)


def test_rows_joined_in_inference_mode_can_be_written(model):
    one = read(model, "h2o", 0.5)
    with torch.inference_mode():
        joined = kvpatch.EvictingCache.concatenate([one, one.clone()])
    assert not any(tensor.is_inference() for tensor in (joined.seen_B, joined.layers[0].keys, joined.layers[0].positions))


def test_what_is_taken_over_in_inference_mode_can_be_written(model):
    with torch.inference_mode():
        past = model(prompt(2, N)).past_key_values
        with kvpatch.patched(model, "window", 0.5) as handle:
            cache = handle.new_cache()
            from_dynamic.absorb(cache, past)
    assert not any(one.is_inference() for one in (cache.seen_B, cache.layers[0].positions))


def test_prompts_are_counted(model):
    """A prompt may be one token, and may be fed one by one; the next tokens evict."""
    with kvpatch.patched(model, "h2o", 4) as handle:
        cache = handle.new_cache()
        for t in range(12):
            model(prompt(2, N)[:, t : t + 1], past_key_values=cache)
            assert cache.turns.count == 1
        assert cache.held(0).unique().tolist() == [4]
        model(prompt(2, 5, seed=2), past_key_values=cache)
        assert (cache.turns.count, cache.turns.open) == (2, False)
        model(prompt(2, 2, seed=2), past_key_values=cache)
        assert cache.turns.count == 3
        whole, pieces = handle.new_cache(), handle.new_cache()
        mask = torch.ones(2, N, dtype=torch.long)
        mask[1, :4] = 0
        model(prompt(2, N), attention_mask=mask, past_key_values=whole)
        pieces.request.prompt_len = N
        for t in range(N):
            model(prompt(2, N)[:, t : t + 1], attention_mask=mask[:, : t + 1], past_key_values=pieces)
        for layer in range(2):
            assert torch.equal(whole.positions(layer).sort().values[..., -4:], pieces.positions(layer).sort().values[..., -4:])


def test_who_is_compiled_by_generate(model):
    assert read(model, "h2o", 0.5).settings.acts is True
    assert read(model, "full", 0.5).settings.acts is False
    assert read(model, "h2o", 0.5).is_compileable is False
    assert read(model, "h2o", 0.5, room=4).is_compileable is True


def test_what_is_protected_twice_is_protected(model):
    """By its place at the text's start and by the user."""
    protect = torch.zeros(N, dtype=torch.bool)
    protect[[0, 4]] = True
    cache = read(model, "window", 8, sinks=2, protect=protect)
    assert set(cache.positions(0)[0, 0].tolist()) - {-1} == {0, 1, 4, *range(15, 20)}


def test_concatenate_is_of_the_class(model):
    cache = read(model, "h2o", 0.5)
    assert cache.concatenate([cache]).seen_B.tolist() == [N, N]


def test_rows_that_move_leave_columns_and_the_clock(model):
    mask = torch.ones(2, N, dtype=torch.long)
    mask[0, :6] = mask[1, :4] = 0
    with kvpatch.patched(model, "h2o", 0.5) as handle:
        cache = handle.new_cache()
        model(prompt(2, N), attention_mask=mask, past_key_values=cache)
    clock = cache.counters.device
    cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.seen_B.tolist() == [N - 4, N - 6]
    assert cache.get_seq_length() == N
    assert cache.counters.device is clock
    assert (cache.stack, cache.stack_due) == (None, False)


def test_what_fails_before_anything_moved_changes_nothing(model):
    cache = read(model, "h2o", 0.5)

    def fail(tensor):
        raise MemoryError

    with pytest.raises(MemoryError):
        cache._map_rows("reorder_cache()", fail)
    assert not cache.unfinished


def test_copies_make_a_deck_of_their_own(model):
    assert read(model, "h2o", 0.5, steps=2).clone().stack_due
    assert not read(model, "h2o", 0.5, room=4).clone().stack_due


def test_temperatures_of_tokens_in_the_pass_that_ends_a_prompt(model):
    """As of tokens that are fed one by one."""
    with kvpatch.patched(model, "keyformer", 0.5, tau=(0.5, 4.0), generation_length=4, noise="none") as handle:
        for turn in range(2):
            at_once, singly = handle.new_cache(), handle.new_cache()
            at_once.request.prompt_len = singly.request.prompt_len = N
            if turn:
                for cache in (at_once, singly):
                    model(prompt(2, N), past_key_values=cache)
                    model(prompt(2, 1, seed=4), past_key_values=cache)
                    cache.request.prompt_len = 2 * N + 1
            ids = prompt(2, N + 3, seed=5)
            model(ids, past_key_values=at_once)
            for piece in ids.split([N, 1, 1, 1], 1):
                model(piece, past_key_values=singly)
            for one, other in zip(at_once.layers, singly.layers, strict=True):
                mine, theirs = (sorted(zip(layer.positions[0, 0].tolist(), layer.state["gumbel"][0, 0].tolist(), strict=True))
                                for layer in (one, other))  # fmt: skip
                mine, theirs = ([pair for pair in pairs if pair[0] >= 0] for pairs in (mine, theirs))
                assert [p for p, _ in mine] == [p for p, _ in theirs]
                assert [score for _, score in mine] == pytest.approx([score for _, score in theirs], rel=1e-4)


def test_the_end_of_a_prompt_foresees_who_takes_the_steps(model):
    """For the report of steps that are compiled, which say nothing themselves."""
    assert read(model, "h2o", 0.5).choice.coming.keys() == {"decode"}
    assert read(model, "adakv", 0.4, window=5).choice.coming.keys() == {"ragged"}


def test_nothing_is_rolled_back(model):
    cache = read(model, "h2o", 0.5, steps=2)
    clock, deck = cache.counters.device, cache.stack
    cache.crop(0)
    assert cache.counters.device is clock
    assert cache.stack is deck is not None


def test_counters_catch_up_with_compiled_steps(model):
    cache = read(model, "h2o", 0.5, room=4)
    compiled.begin(cache, None, None)  # and its layers run unseen
    compiled.end(cache)
    assert cache.counters.behind
    assert cache.layers[0].seen == N
    assert cache.get_seq_length() == N + 1
    assert (cache.counters.behind, cache.counters.steps, cache.unfinished) == (False, 1, False)


@pytest.mark.parametrize(("schedule", "most"), [("prompt", N), ("both", N), ("decode", 2 * N)])
def test_a_pyramid_gives_no_layer_more_than_its_prompt(model, schedule, most):
    """Unless tokens are to come that may fill it."""
    with kvpatch.patched(model, "pyramid(h2o)", 0.9, schedule=schedule) as handle:
        cache = handle.new_cache()
    shares = [cache.settings.tokens(layer, N) for layer in range(2)]
    assert sum(shares) == 2 * int(0.9 * N)
    assert (shares[0] > N) == (schedule == "decode")
    assert shares[0] <= most


def test_who_remembers_generated_tokens():
    assert get_policy("h2o").remembers is False
    assert dataclasses.replace(get_policy("h2o"), schedule="prompt").remembers is True


def test_heads_that_hold_the_same_tokens():
    for name, aligned in {"tova": True, "h2o": True, "adaptive(tova)": False, "critical(tova)": False, "adakv": False}.items():
        assert get_policy(name).aligned is aligned
