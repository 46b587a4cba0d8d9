"""What a layer allocates while its heads are below their budget: what they hold and a stated slack, in every layout."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpatch
from kvpatch import EvictingCache, KVPatchError
from kvpatch.backends.head_offsets import HeadOffsets
from kvpatch.cache.growth import capacities, plan
from kvpatch.errors import InvalidError
from tests.helpers import tiny_families
from tests.helpers.comparing import SMALL, combined
from tests.helpers.marks import slow_but
from tests.helpers.running import kept
from tests.helpers.tiny import force, left_pad, make, prompt

WIDE = 4096  # tokens of a budget that no test reaches


def slack(tokens):
    return max(8, tokens // 16)


def bytes_fit(cache):
    """Of every layer: no more than its longest head holds (or has columns appended), and a sixteenth or 8 entries more."""
    for index, layer in enumerate(cache.layers):
        heads, D = cache.held(index).numel(), layer.kv.keys.shape[-1]
        most = int(cache.held(index).max()) if layer.mode.evicts else layer.taken
        for buffer in (layer.kv.keys, layer.kv.values):
            slots = buffer.numel() // D
            assert slots <= heads * (most + slack(most)), f"layer {index}: {slots / heads} slots a head, {most} of them taken"
    return cache


def go(model, ids, fed, mask=None, cache=None, check=bytes_fit):
    """`force` with a check after the prompt and every step."""
    logits, cache = force(model, ids, fed[:, :0], mask, cache)
    check(cache)
    for t in range(fed.shape[1]):
        place = {} if model.config.model_type == "mpt" else {"position_ids": cache.next_positions()}
        with torch.no_grad():
            one = model(fed[:, t : t + 1], past_key_values=cache, **place).logits
        logits = torch.cat([logits, one], 1)
        check(cache)
    return logits, cache


def rows_agree(model, ids, fed, lengths, logits, cache):
    for row, n in enumerate(lengths):
        alone, one = force(model, ids[row : row + 1, -n:], fed[row : row + 1])
        torch.testing.assert_close(logits[row : row + 1], alone, atol=3e-5, rtol=0)
        assert [layer[row] for layer in kept(cache)] == [layer[0] for layer in kept(one)]


ABOVE = [
    ("h2o", (), WIDE, {}),
    ("h2o", (), 34, {}),
    ("roco", (), 30, {"recent": 2, "protected": 0.2}),
    ("keyformer", (), 28, {"schedule": "decode"}),
    ("tova", (), 9, {"schedule": "decode"}),
    ("tova", ("critical",), 32, {}),
    ("h2o", ("adaptive",), 31, {}),
    ("window", ("pyramid",), 30, {}),
    ("snapkv", (), 30, {"window": 4}),
    ("h2o", (), 33, {"positions": "renumbered"}),
    ("h2o", (), 30, {"strict": True}),
    ("full", (), 1.0, {}),
]


@pytest.mark.parametrize("lengths", [(20, 17), (25, 6), (130, 110)], ids=str)
@pytest.mark.parametrize(("policy", "wrap", "k", "options"), ABOVE, ids=str)
def test_a_padded_batch_below_its_budget_allocates_what_it_holds(policy, wrap, k, options, lengths):
    """And at every step up to the budget and past it; a row gives what it gives alone."""
    k = k + 110 if isinstance(k, int) and lengths[0] > 100 and options.get("schedule") != "decode" else k
    model, ids, fed = make("llama_gqa"), prompt(2, lengths[0]), prompt(2, 30, seed=2)
    chosen = {**options, "generation_length": 9} if policy == "keyformer" else options
    with kvpatch.patched(model, combined(policy, wrap), k, **chosen):
        logits, cache = go(model, ids, fed, left_pad(ids, lengths))
        rows_agree(model, ids, fed, lengths, logits, cache)


@pytest.mark.parametrize("backend", slow_but(("torch",), ("torch", "triton")))
def test_four_prompts_of_some_twenty_tokens(backend):
    """Under a budget of thousands: a kernel writes into slots that grow, too."""
    if backend == "triton":
        pytest.importorskip("triton")
    model, lengths = make("llama_gqa"), (20, 17, 19, 18)
    ids, fed = prompt(4, 20), prompt(4, 12 if backend == "triton" else 40, seed=2)
    with kvpatch.patched(model, "h2o", WIDE, backend=backend):
        logits, cache = go(model, ids, fed, left_pad(ids, lengths))
        rows_agree(model, ids, fed, lengths, logits, cache)


@pytest.mark.slow
def test_a_kernel_grows_ragged_heads_to_their_budget_and_goes_on():
    """Of which one evicts while the other has no slot left."""
    pytest.importorskip("triton")
    model, lengths = make("llama_gqa", layers=1), (26, 6)
    ids, fed, mixed = prompt(2, 26), prompt(2, 26, seed=2), []

    def look(cache):
        bytes_fit(cache)
        layer = cache.layers[0]
        full = bool((layer.mode.free_BH == layer.kv.head_offsets.capacity_N.view(2, 2)).any())
        mixed.append(full and layer.mode.has_short_heads and not layer.mode.all_heads_short)

    with kvpatch.patched(model, "h2o", 28, backend="triton"):
        logits, cache = go(model, ids, fed, left_pad(ids, lengths), check=look)
        assert any(mixed)
        assert not cache.layers[0].kv.appends
        rows_agree(model, ids, fed, lengths, logits, cache)


@pytest.mark.parametrize(("policy", "k"), [("full", 1.0), ("h2o", 0.5), ("h2o", WIDE)])
@pytest.mark.parametrize("name", ["gemma2", "qwen2_mixed", "gpt_oss"])
def test_layers_with_a_wide_sliding_window_allocate_what_they_hold(name, policy, k, monkeypatch):
    kind, given = tiny_families.FAMILIES[name]
    for window in (WIDE, 24):
        monkeypatch.setitem(tiny_families.FAMILIES, name, (kind, {**given, "sliding_window": window}))
        model, lengths = tiny_families.make(name), (20, 17)
        ids, fed = prompt(2, 20), prompt(2, 12, seed=2)
        with kvpatch.patched(model, policy, k):
            logits, cache = go(model, ids, fed, left_pad(ids, lengths))
            rows_agree(model, ids, fed, lengths, logits, cache)


@pytest.mark.parametrize("k", [WIDE, 30])
def test_beams_over_a_padded_batch(k):
    model, ids, lengths = make("llama_gqa"), prompt(2, 20), (20, 17)
    mask, count = left_pad(ids, lengths), 0

    def look(_, scores):
        nonlocal count
        count += bool(bytes_fit(cache))
        return scores

    with kvpatch.patched(model, "h2o", k) as patch:
        given = {"num_beams": 3, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
        cache = patch.new_cache()
        out = model.generate(ids, attention_mask=mask, past_key_values=cache, logits_processor=[look], **given)
        assert count == 24
        for row, n in enumerate(lengths):
            alone = model.generate(ids[row : row + 1, -n:], **given)
            assert torch.equal(out[row, 20:], alone[0, n:])


@pytest.mark.parametrize(("policy", "k"), [("h2o", WIDE), ("h2o", 34), ("adaptive(roco)", 34), ("snapkv", 0.5), ("full", 1.0)])
def test_joined_rows_below_their_budget(policy, k, tmp_path):
    """Saved and loaded, and with a row that goes, as well."""
    model, lengths, fed = make("llama_gqa", dtype=torch.float64), (60, 17, 9), prompt(3, 40, seed=2)
    with torch.no_grad(), kvpatch.patched(model, policy, k, **SMALL.get(policy, {})) as patch:
        parts = [force(model, prompt(1, n, seed=n), fed[:1, :0])[1] for n in lengths]
        cache = bytes_fit(EvictingCache.concatenate(parts))
        alone = [force(model, prompt(1, n, seed=n), fed[i : i + 1])[0] for i, n in enumerate(lengths)]
        rows = [0, 1, 2]
        for t in range(40):
            if t == 5:
                patch.save_cache(cache, tmp_path / "cache")
                cache = patch.load_cache(tmp_path / "cache")
            if t == 12:
                cache.batch_select_indices(torch.tensor([1, 2]))
                rows = bytes_fit(cache) and [1, 2]
            logits = model(fed[rows, t : t + 1], past_key_values=cache).logits[:, 0]
            bytes_fit(cache).check_invariants()
            torch.testing.assert_close(logits, torch.stack([alone[row][0, t + 1] for row in rows]), atol=1e-6, rtol=0)


def test_a_short_row_beside_a_long_one_is_ragged_while_both_are_below_their_budget():
    model, ids, lengths, fed = make("llama_gqa"), prompt(2, 200), (200, 20), prompt(2, 30, seed=2)

    def short_is_short(cache):
        held = [int(n) for n in cache.held(0).sum(1)]
        slots = cache.nbytes // (2 * 2 * 8 * 4)
        assert slots <= sum(held) + 4 * slack(sum(held) // 4)

    with kvpatch.patched(model, "h2o", WIDE):
        logits, cache = go(model, ids, fed, left_pad(ids, lengths), check=short_is_short)
        rows_agree(model, ids, fed, lengths, logits, cache)


@pytest.mark.parametrize("lengths", [(20, 17), (40, 6), None], ids=str)
@pytest.mark.parametrize("policy", ["h2o", "keyformer", "window", "full"])
def test_steps_are_rolled_back_over_buffers_that_grew(policy, lengths):
    """Drafts that are taken back, time and again; and what is left is no larger than it was."""
    n = 20 if lengths is None else lengths[0]
    model, ids, fed = make("llama_gqa"), prompt(2, n), prompt(2, 40, seed=2)
    mask = None if lengths is None else left_pad(ids, lengths)
    k = 1.0 if policy == "full" else n + 14
    with kvpatch.patched(model, policy, k) as patch, torch.no_grad():
        want, plain = force(model, ids, fed, mask)
        cache = patch.new_cache()
        force(model, ids, fed[:, :0], mask, cache)
        cache.activate_past_recording()
        got = []
        for start in range(0, 40, 4):
            wrong = prompt(2, 13, seed=start)
            for t in range(13):
                model(wrong[:, t : t + 1], past_key_values=cache, position_ids=cache.next_positions())
                bytes_fit(cache).check_invariants()
            cache.crop(-6)
            bytes_fit(cache).check_invariants()
            cache.crop(-7)
            bytes_fit(cache).check_invariants()
            for t in range(start, start + 4):
                place = cache.next_positions()
                got.append(model(fed[:, t : t + 1], past_key_values=cache, position_ids=place).logits)
                bytes_fit(cache).check_invariants()
    torch.testing.assert_close(torch.cat(got, 1), want[:, 1:], atol=1e-5, rtol=0)
    assert kept(plain) == kept(cache)


@pytest.mark.parametrize(("k", "room", "slots"), [(WIDE, 12, 32), (24, 12, 25), (WIDE, 300, 320), (20, 50, 21), (0.5, 50, 11)])
@pytest.mark.parametrize("padded", [False, True])
def test_room_is_for_so_many_tokens_and_never_above_the_budget(k, room, slots, padded):
    model, ids, fed = make("llama_gqa"), prompt(2, 20), prompt(2, 30, seed=2)
    lengths = (20, 18) if padded else (20, 20)
    with kvpatch.patched(model, "h2o", k) as patch:
        cache = patch.new_cache(room=room)
        force(model, ids, fed[:, :0], left_pad(ids, lengths), cache)
        assert [layer.positions.shape[2] for layer in cache.layers] == [slots] * 2
        logits, _ = go(model, ids, fed, left_pad(ids, lengths), patch.new_cache(room=room), EvictingCache.check_invariants)
        want, plain = force(model, ids, fed, left_pad(ids, lengths))
        torch.testing.assert_close(logits, want, atol=3e-5, rtol=0)


def test_tokens_that_generate_knows_of_are_no_reason_for_more():
    model, ids = make("llama_gqa"), prompt(2, 20)
    for policy, k in (("full", 1.0), ("snapkv", 0.5), ("h2o", WIDE)):
        with kvpatch.patched(model, policy, k) as patch:
            cache = patch.new_cache()
            cache.plans.new_tokens, cache.plans.prompt_len = 500, 20
            go(model, ids, prompt(2, 20, seed=2), cache=cache)
            few = patch.new_cache()
            few.plans.new_tokens, few.plans.prompt_len = 3, 20
            force(model, ids, prompt(2, 3, seed=2), cache=few)
            held = few.held(0).max()
            assert few.layers[0].keys.shape[2] == held


def test_rows_that_are_dropped_take_their_slots_with_them():
    """Of many heads one that is much shorter wastes too little to make the layer ragged."""
    model, lengths = make("llama_gqa", layers=1), [60] * 40 + [20]
    ids = prompt(41, 60)
    for k in (WIDE, 0.5):
        with kvpatch.patched(model, "h2o", k):
            cache = force(model, ids, ids[:, :2], left_pad(ids, lengths))[1]
            twin, want = cache.clone(), force(model, ids[40:, 40:], ids[40:, :9])[0][:, 3:]
            cache.batch_select_indices(torch.tensor([40]))
            twin.reorder_cache(torch.tensor([40] * 41))
            for one in (cache, twin):
                bytes_fit(one).check_invariants()
                for t in range(2, 9):
                    with torch.no_grad():
                        at = one.next_positions()
                        got = model(ids[40:, t : t + 1].expand(len(at), -1), past_key_values=one, position_ids=at).logits
                    torch.testing.assert_close(got[:1], want[:, t - 2 : t - 1], atol=3e-5, rtol=0)
                    bytes_fit(one).check_invariants()


def test_a_padded_batch_that_fills_its_budget_is_not_compiled_without_room():
    """Its buffers move; with room they do not."""
    model, ids, fed = make("llama_gqa", layers=1), prompt(2, 20), prompt(2, 6, seed=2)
    mask = left_pad(ids, (20, 17))
    with kvpatch.patched(model, "h2o", WIDE) as patch, torch.no_grad():
        for room in (None, 5):
            torch._dynamo.reset()
            cache = patch.new_cache(room=room)
            force(model, ids, fed[:, :0], mask, cache)
            step = torch.compile(model.forward, fullgraph=True, backend="eager")
            if room is None:
                with pytest.raises(torch._dynamo.exc.Unsupported, match="only a decode step over a cache of its final size"):
                    step(fed[:, :1], past_key_values=cache, position_ids=cache.next_positions())
                continue
            want = force(model, ids, fed, mask)[0]
            for t in range(5):
                got = step(fed[:, t : t + 1], past_key_values=cache, position_ids=cache.next_positions()).logits
                torch.testing.assert_close(got[:, 0], want[:, t + 1], atol=3e-5, rtol=0)
            with pytest.raises(RuntimeError, match="no free slot"):
                step(fed[:, :1], past_key_values=cache, position_ids=cache.next_positions())
    torch._dynamo.reset()


# ---- the rule, and the check ----


@settings(max_examples=200)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=130), st.integers(0, 500), st.booleans())
def test_a_plan_keeps_the_slack_and_never_passes_the_budget(counts, above, evicts):
    goals = [max(counts) + above + 1] * len(counts) if evicts else None
    layout = plan(counts, goals)
    sizes = layout.capacities
    assert all(n + evicts <= size for n, size in zip(counts, sizes, strict=True))
    assert goals is None or max(sizes) <= goals[0]
    if layout.filled is not None:
        rows = HeadOffsets(sizes, counts, torch.device("cpu")).rows
        assert rows <= sum(counts) + len(counts) * slack(sum(counts) // len(counts))
    else:
        assert max(sizes) <= max(counts) + slack(max(counts))
    assert capacities([3, 9], [5, 50], 4) == [5, 13]


@pytest.mark.parametrize("room", [None, 90])
def test_many_heads_stay_within_the_slack(room):
    model, lengths = make("llama_gqa", layers=1), [300 - 3 * row for row in range(40)]
    ids = prompt(40, 300)
    for policy, k in (("h2o", WIDE), ("h2o", 310), ("h2o", 0.5), ("adakv", 0.5)):
        with kvpatch.patched(model, policy, k) as patch:
            cache = patch.new_cache(room=room)
            force(model, ids, ids[:, :30], left_pad(ids, lengths), cache)  # which checks
            assert cache.layers[0].kv.head_offsets is not None


def test_what_is_too_large_is_found():
    """By the check that the loader, strict=True and the state machine share."""
    model, ids, mask = make("llama_gqa"), prompt(2, 20), left_pad(prompt(2, 20), (20, 17))
    spoils = {
        "slots are allocated": lambda layer: layer._move_slots([60] * 4) or layer.measure_room(),
        "free_BH names no slot": lambda layer: setattr(layer.mode, "free_BH", layer.mode.free_BH + 90),
        "a free slot is taken": lambda layer: setattr(layer.mode, "free_BH", layer.mode.free_BH * 0),
        "has gaps": lambda layer: setattr(layer.mode, "free_BH", layer.mode.free_BH + 1),
        "a head may reach its budget": lambda layer: layer.keep_BH1[0].fill_(27),
        "growing is not what": lambda layer: setattr(layer.mode, "has_short_heads", False),
        "fewer slots are free": lambda layer: setattr(layer.mode, "slack", layer.mode.slack + 1),
        "a head holds a token twice": lambda layer: layer.positions[1, 0, :2].fill_(0),
        "filling is not the steps to go": lambda layer: setattr(layer.mode, "steps_until_full", 0),
    }
    with kvpatch.patched(model, "h2o", WIDE, strict=True):
        for words, spoil in spoils.items():
            cache = force(model, ids, ids[:, :2], mask)[1]
            cache.check_invariants()
            spoil(cache.layers[1])
            with pytest.raises(InvalidError, match=f"layer 1: .*{words}"):
                cache.check_invariants()
    with kvpatch.patched(model, "h2o", WIDE, strict=True):
        cache = force(model, ids, ids[:, :2], mask)[1]
        cache.layers[1]._move_slots([60] * 4)
        cache.layers[1].measure_room()
        with pytest.raises(KVPatchError, match=r"strict=True: after this pass .* contradicts itself: layer 1: .*8 a head"):
            model(ids[:, :1], past_key_values=cache)


def test_every_layout_is_seen():
    """The cases above go through columns, dense slots and ragged ones."""
    model, ids, seen = make("llama_gqa"), prompt(2, 25), set()
    for lengths, k in itertools.product(((25, 25), (25, 22), (25, 6)), (WIDE, 0.5)):
        with kvpatch.patched(model, "h2o", k):
            layer = force(model, ids, ids[:, :1], left_pad(ids, lengths))[1].layers[0]
        seen.add((not layer.mode.fills_free_slots, layer.kv.appends, layer.mode.has_short_heads))
    assert seen == {(True, True, False), (False, True, True), (False, True, False), (False, False, True), (False, False, False)}


def test_ragged_heads_start_with_half_of_the_slack():
    """The other half is given when it is needed."""
    assert plan([1600, 800], None).capacities == [1637, 837]  # slack of 1200 tokens: 75
    assert plan([1600, 800], None, exactly=True).capacities == [1675, 875]
    assert plan([100, 20], None).capacities == [108, 28]
    assert plan([100, 20] * 40, None).capacities == [108, 28] * 40


def test_what_was_appended_is_the_newest():
    """By the same check, in a layer whose tokens are appended after the kept ones."""
    model, ids = make("llama_gqa"), prompt(1, 20)
    with kvpatch.patched(model, "snapkv", 0.5):
        cache = force(model, ids, ids[:, :3])[1]
    layer = cache.layers[0]
    cache.check_invariants()
    old = set(range(20)) - set(layer.positions[0, 0].tolist())
    layer.positions[0, 0, layer.columns_used - 1] = max(old)
    with pytest.raises(InvalidError, match="what was appended is not the newest"):
        cache.check_invariants()


def test_a_head_holds_its_first_token_once():
    model, ids = make("llama_gqa"), prompt(1, 20)
    with kvpatch.patched(model, "snapkv", 0.5):
        cache = force(model, ids, ids[:, :3])[1]
    cache.layers[0].positions[0, 0, :2] = 0
    with pytest.raises(InvalidError, match="a head holds a token twice"):
        cache.check_invariants()
