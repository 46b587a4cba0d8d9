"""Laws 3 and 10: the settings say what every head will hold, and how many slots are allocated for it (cache/holding.py)."""

import dataclasses
import functools
import random

import pytest
import torch
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st

import kvpatch
from kvpatch.cache.holding import count_held
from kvpatch.errors import InvalidError
from kvpatch.policies.budgets import Budget, Size
from kvpatch.policies.selection import MAX_POSITION
from kvpatch.policies.slopes import Pyramid, Sloped
from tests.helpers import tiny_families
from tests.helpers.comparing import combined
from tests.helpers.running import feed
from tests.helpers.tiny import left_pad, make, prompt

H, LAYERS = 2, {"llama_gqa": 3, "gemma3": 2}  # every second layer of gemma3 holds a window of 7


@functools.cache
def model_of(name):
    return tiny_families.make(name) if name == "gemma3" else make(name, layers=LAYERS[name])


SIZES = st.one_of(st.floats(0.02, 0.98), st.integers(1, 90))
MOVING = (kvpatch.Share(0.4), kvpatch.Share(0.9), kvpatch.Mass(0.8), kvpatch.Mass(0.9, ceiling=0.5), kvpatch.Threshold(0.05))


@st.composite
def choices(draw):
    """A model's name, a policy, its k and options, such that few are refused."""
    name, kind = draw(st.sampled_from(tuple(LAYERS))), draw(st.sampled_from(("one", "layers", "heads", "moving")))
    schedule = draw(st.sampled_from(("prompt", "decode", "both")))
    wraps = draw(st.sampled_from(((), (), ("pyramid",), ("adaptive",), ("global_topk",)))) if kind in ("one", "layers") else ()
    every = draw(st.sampled_from((1, 1, 3))) if schedule != "prompt" and kind == "one" else 1
    if kind == "one":
        k = draw(SIZES)
        k = max(k, every) if isinstance(k, int) else k
    elif kind == "layers":
        k = [draw(st.one_of(SIZES, st.just(1.0))) for _ in range(LAYERS[name])]
    elif kind == "heads":
        k = [[draw(SIZES) for _ in range(H)] for _ in range(LAYERS[name])]
    else:
        k = draw(st.sampled_from(MOVING))
    block = draw(st.sampled_from((None, None, 5, 16)))
    return name, combined("h2o", wraps), k, {"schedule": schedule, "every": every, "recent": 2, "block": block}


def compare(cache, lengths, steps, room):
    """What a cache holds and allocates beside what its settings say: at most that, and exactly where the function says so."""
    how, held, said = cache.settings, [], []
    for index, layer in enumerate(cache.layers):
        policy, rule = how.policies[index], how.rules[index]
        rows = [count_held(how, index, n, steps, heads=H, room=room or 0) for n in lengths]
        held.append(cache.held(index))
        said.append(torch.tensor([one.heads for one in rows]))
        slots, most = sum(layer.kv.capacities()), [H * one.slots for one in rows]
        assert index in how.together or slots <= len(rows) * max(most), f"layer {index}: {slots} slots, {most} said"
        if policy.over_heads is None:
            assert (held[-1] <= said[-1]).all(), (index, held[-1], said[-1])
            assert rule.weighs or (held[-1] > said[-1] - policy.every).all(), (index, held[-1], said[-1])
            evicted = rule.aligned and not rule.moves and policy.schedule == "both" and min(lengths) > int(said[-1].max())
            assert not evicted or min(most) < max(most) or slots == sum(most), f"layer {index}: {slots} slots, {most} said"
        elif index not in how.together and policy.every == 1:
            assert held[-1].sum(-1).tolist() == said[-1].sum(-1).tolist(), (index, held[-1], said[-1])
    if how.policy.every == 1 and not any(rule.weighs for rule in how.rules):
        assert sum(held).sum(-1).tolist() == sum(said).sum(-1).tolist()


def once(k, wraps=(), n=30, **options):
    """A case that is always tried."""
    how = {"schedule": "both", "every": 1, "recent": 2, "block": None, **options}
    return example(chosen=("llama_gqa", combined("h2o", wraps), k, how), n=n, pad=0, steps=12, room=None)


@once(kvpatch.Share(0.4))
@once(kvpatch.Mass(0.9, ceiling=0.5))
@once(12, every=3)
@once(40, every=3, schedule="decode")
@once(0.5, ("pyramid",))
@once(40, ("adaptive",))
@once(0.3, ("global_topk",))
@settings(max_examples=60)
@given(
    chosen=choices(),
    n=st.integers(1, 70),
    pad=st.sampled_from((0, 0, 1, 7, 20)),
    steps=st.integers(0, 12),
    room=st.sampled_from((None, None, 3, 30)),
)
def test_the_settings_say_what_heads_hold_and_allocate(chosen, n, pad, steps, room):
    name, policy, k, options = chosen
    model, ids, fed, lengths = model_of(name), prompt(2, n + pad), prompt(2, steps, seed=2), [n + pad, n]
    try:
        handle = kvpatch.patch(model, policy, k, **options)
    except kvpatch.KVPatchError:
        reject()
    try:
        with torch.no_grad():
            cache, mask = handle.new_cache(room=room), left_pad(ids, lengths)
            model(ids, attention_mask=mask, past_key_values=cache, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
            compare(cache, lengths, 0, room)
            for t in range(steps):
                model(fed[:, t : t + 1], past_key_values=cache, position_ids=cache.next_positions())
                compare(cache, lengths, t + 1, room)
            cache.check_invariants()
    finally:
        kvpatch.unpatch(model)


@pytest.mark.parametrize("k", [0.3, 12, 50])
@pytest.mark.parametrize("turns", ["all", "each", "first"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_prompt_behind_one_that_was_read_before(name, turns, k):
    """As of a request that begins with a prefix."""
    model, ids, read, new = model_of(name), prompt(1, 64), 30, 4
    with torch.no_grad(), kvpatch.patched(model, "snapkv", k, window=5, kernel=3, turns=turns) as patch:
        cache = feed(model, patch, ids[:, :read], ids[:, read:60], *ids[:, 60:].split(1, 1))
    for layer in range(len(cache.layers)):
        said = count_held(cache.settings, layer, 60, new, heads=H, read=read)
        assert cache.held(layer)[0].tolist() == said.heads
        assert sum(cache.layers[layer].kv.capacities()) <= H * said.slots


def test_what_grows_with_the_text_has_no_most():
    model = model_of("gemma3")
    for policy, schedule, k, most in (
        ("h2o", "prompt", 12, None), ("h2o", "both", 12, 12), ("h2o", "decode", 12, 42), ("h2o", "both", [12, 1.0], None),
        ("full", None, 0.5, None), ("h2o", "both", kvpatch.Share(0.5), None),
    ):  # fmt: skip
        with kvpatch.patched(model, policy, k, schedule=schedule) as patch:
            window, full = (count_held(patch.settings, layer, 30, None).heads[0] for layer in (0, 1))
        assert window == 7
        assert full == most or (most is None and full >= MAX_POSITION)


def test_the_highest_budget_of_a_layer_is_that_of_a_prompt_of_any_length():
    """A layer of a pyramid has more or fewer tokens after a shorter prompt, by its place and its size."""
    draw = random.Random(0)
    for _ in range(300):
        k, layers, longest = draw.choice((draw.random(), draw.randint(1, 90))), draw.randint(1, 7), draw.randint(1, 120)
        last, bounded, pyramid = draw.randint(1, 20), draw.random() < 0.5, Pyramid(draw.choice((1, 1.5, 4, 20)))
        for layer in range(layers):
            rule = Sloped(Size(k), pyramid, layer, layers, last, bounded)
            most = max(rule.tokens(n) for n in range(1, longest + 1))
            assert most <= rule.highest(longest, 1)[0] <= most + 1


@pytest.mark.parametrize(
    ("k", "less", "schedule"),
    [
        (kvpatch.Share(0.5), kvpatch.Share(0.4), "both"),
        (16, 15, "decode"),
        (90, 80, "both"),  # which no head holds yet
        ([[12, 16]] * 3, [[12, 15]] * 3, "both"),
    ],
    ids=str,
)
def test_a_cache_that_may_hold_more_than_its_settings_say_breaks_an_invariant(k, less, schedule):
    model = model_of("llama_gqa")
    with torch.no_grad(), kvpatch.patched(model, "h2o", k, recent=2, schedule=schedule) as patch:
        cache = feed(model, patch, prompt(1, 40), *prompt(1, 20, seed=2).split(1, 1))
        cache.check_invariants()
        cache.settings = dataclasses.replace(cache.settings, budget=Budget.parse(less, n_layers=3, bytes_per_token=1))
        with pytest.raises(InvalidError, match="over the budget"):
            cache.check_invariants()
