"""Capacity classes: prompts of different lengths share one captured step, which computes what the model's own steps do."""

import random

import pytest
import torch

import kvpatch
from kvpatch.cache.growth import slack
from kvpatch.hooks.capacity import round_capacities, round_capacity
from kvpatch.hooks.graph import KINDS, StepGraph
from tests.helpers.comparing import same_tokens
from tests.helpers.marks import slow_but
from tests.helpers.recording import FakeRecorder
from tests.helpers.tiny import make, prompt
from tests.hooks.test_graph import STEPS, _as_on_a_device, held, steps  # noqa: F401

pytestmark = pytest.mark.usefixtures("no_gradients")
LENGTHS = (24, 30, 27, 25)  # half of them and a slot for the new token are 13 to 16 slots: one class


def test_a_class_has_less_to_spare_than_a_cache_may():
    """Every capacity up to 70,000; 16 classes for each doubling."""
    classes = {slots: round_capacity(slots) for slots in range(1, 70_000)}
    assert all(slots <= own < slots + max(8, slots // 16) for slots, own in classes.items())
    assert all(own - (slots - 1) <= slack(slots - 1) for slots, own in classes.items()), "beside the tokens between two steps"
    assert all(round_capacity(own) == own for own in set(classes.values()))
    for least in (256, 4096, 32768):
        assert len({classes[slots] for slots in range(least + 1, 2 * least + 1)}) == 16


CASES = [
    ("llama_gqa", "h2o", {}),
    ("llama_gqa", "roco", {}),
    ("llama_gqa", "snapkv", {"window": 4, "room": STEPS}),
    ("llama_gqa", "keyformer", {"tau": (1.0, 3.0), "generation_length": 6}),
    ("gpt2", "scissorhands", {}),
    ("mpt", "tova", {}),
    ("gptj", "h2o", {"bits": 8}),
    ("llama_gqa", "streaming_llm", {"bits": 4}),
    ("llama_gqa", "critical(h2o)", {}),
    ("llama_gqa", "pyramid(h2o)", {"lengths": (24, 25, 24)}),
    ("mistral_sliding", "h2o", {}),
    ("llama_gqa", "full", {"k": 1.0, "room": STEPS, "lengths": (26, 31, 28)}),
    ("llama_gqa", "h2o", {"k": 9, "schedule": "decode", "room": STEPS + 9}),
    ("llama_gqa", "random", {}),
    ("llama_gqa", "h2o", {"every": 4, "room": STEPS, "lengths": (26, 34, 28)}),
]


@pytest.mark.parametrize(("name", "policy", "options"), slow_but(CASES[:3], CASES), ids=str)
def test_prompts_of_different_lengths_share_one_graph(name, policy, options):
    model, options = make(name), dict(options)
    room, k = options.pop("room", None), options.pop("k", 0.5)
    lengths = options.pop("lengths", LENGTHS)
    with kvpatch.patched(model, policy, k, **options) as patch:
        want, kept = steps(patch, model, lengths, room)
        graph = StepGraph(model, patch._state, FakeRecorder)
        got, found = steps(patch, model, lengths, room, graph)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=0)
    assert same_tokens(found, kept)
    assert graph.captures == 1 and graph.replays == len(lengths) * STEPS - 1


def test_rounding_keeps_positions_to_the_last_step():
    """In float64, where another sum of zeros cannot blur them: 40 steps, the same tokens at each."""
    model, more = make("llama_gqa", dtype=torch.float64), prompt(2, 40, seed=9)
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        caches = [patch.new_cache(), patch.new_cache()]
        for cache in caches:
            model(prompt(2, 27), past_key_values=cache)
        round_capacities(caches[1])
        for t in range(more.shape[1]):
            outs = [model(more[:, t : t + 1], past_key_values=cache).logits for cache in caches]
            torch.testing.assert_close(outs[1], outs[0], atol=1e-12, rtol=0)
            assert same_tokens(held(caches[1]), held(caches[0]))
            caches[1].check_invariants()
    assert [cache.layers[0].positions.shape[2] for cache in caches] == [14, 16]


@pytest.mark.parametrize(("policy", "k", "room"), [("snapkv", 0.5, 64), ("full", 1.0, 90)], ids=str)
def test_room_that_was_asked_for_is_rounded_with_the_rest(policy, k, room):
    """The invariants take a sixteenth of all slots beside the room; so many more tokens fit."""
    model = make("llama_gqa")
    with kvpatch.patched(model, policy, k) as patch:
        cache = patch.new_cache(room=room)
        model(prompt(1, 400), past_key_values=cache)
        before = cache.layers[0].positions.shape[2]
        round_capacities(cache)
        mode = cache.layers[0].mode
        assert mode.writes_left == room + round_capacity(before) - before > room
        assert int(cache.counters.tensors.limit) == 400 + mode.writes_left
        cache.check_invariants()


def test_a_budget_in_tokens_needs_no_slot_more():
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 9) as patch:
        graph = StepGraph(model, patch._state, FakeRecorder)
        for n in LENGTHS:
            cache = patch.new_cache()
            model(prompt(2, n), past_key_values=cache)
            before = cache.nbytes
            for _ in range(3):
                graph(prompt(2, 1), cache)
            assert cache.nbytes == before and not any(layer.may_have_empty for layer in cache.layers)
    assert graph.captures == 1


@pytest.mark.parametrize(("policy", "options", "room"), [("h2o", {}, None), ("snapkv", {"window": 4}, STEPS)], ids=str)
def test_what_follows_the_graph_is_as_without_it(policy, options, room, tmp_path):
    """The invariants, a further prompt, rows of their own, a file, and joined rows."""
    model, found = make("llama_gqa"), []
    with kvpatch.patched(model, policy, 0.5, **options) as patch:
        for graph in (None, StepGraph(model, patch._state, FakeRecorder)):
            cache = patch.new_cache(room=room)
            model(prompt(2, 27), past_key_values=cache)
            for t in range(STEPS):
                new = prompt(2, 1, seed=t)
                model(new, past_key_values=cache) if graph is None else graph(new, cache)
            cache.check_invariants()
            path = tmp_path / "cache.safetensors"
            patch.save_cache(cache, path)
            others = [cache, patch.load_cache(path), cache.clone().select_rows([1, 0])]
            if room is None:  # which joined rows have not
                others.append(type(cache).concatenate([cache.clone(), cache.clone()]))
                place = {"position_ids": others[-1].next_positions()}
                found.append(model(prompt(4, 1, seed=5), past_key_values=others[-1], **place).logits)
            for other in others[:3]:
                for new in (prompt(2, 11, seed=7), prompt(2, 1, seed=8)):
                    found.append(model(new, past_key_values=other).logits)
                other.check_invariants()
            found += [positions.double() for other in others for positions in held(other)]
    half = len(found) // 2
    for want, got in zip(found[:half], found[half:], strict=True):
        torch.testing.assert_close(got.sort(-1).values[..., -9:], want.sort(-1).values[..., -9:], atol=2e-5, rtol=0)


def test_a_hundred_lengths_are_seven_classes():
    """Prompts of 20 to 119 tokens, in any order: each class is captured once."""
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        graph = StepGraph(model, patch._state, FakeRecorder)
        for n in random.Random(0).sample(range(20, 120), 100):
            cache = patch.new_cache()
            model(prompt(1, n), past_key_values=cache)
            for _ in range(2):
                graph(prompt(1, 1), cache)
    classes = {round_capacity(n // 2 + 1) for n in range(20, 120)}
    assert graph.captures == len(classes) == len(graph._known) == 7 < KINDS


def test_heads_of_unequal_sizes_stay_as_they_are():
    """Their entries are as many as the text says, so that another text has other shapes whatever is rounded."""
    model = make("llama_gqa")
    with kvpatch.patched(model, "adaptive(h2o)", 0.5) as patch:
        cache = patch.new_cache()
        model(prompt(1, 60), past_key_values=cache)
        ragged = [layer.kv.head_offsets is not None for layer in cache.layers]
        before = [layer.kv for layer in cache.layers]
        round_capacities(cache)
        same = [layer.kv is kv for layer, kv in zip(cache.layers, before, strict=True)]
    assert any(ragged) and same == ragged
