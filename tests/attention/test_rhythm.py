"""`every=m`: a head holds its budget and up to m - 1 tokens more between steps, and evicts m at once."""

import pytest
import torch

import kvpatch
from kvpatch import KVPatchError
from kvpatch.hooks.graph import StepGraph
from kvpatch.policies import rhythm
from tests.helpers.comparing import ANY_SCHEDULE, SMALL, certain
from tests.helpers.marks import slow_but
from tests.helpers.recording import FakeRecorder
from tests.helpers.running import feed, kept, run
from tests.helpers.tiny import force, left_pad, make, prompt

ADAPTIVE = "adaptive(h2o)"
SETTINGS = [  # all heads alike, rows that differ, heads that differ, and a prompt below its budget
    ("h2o", 0.4, (0, 0)),
    ("roco", 0.4, (0, 9)),
    (ADAPTIVE, 0.4, (0, 0)),
    ("tova", 26, (0, 9)),
]


@pytest.fixture(scope="module")
def model():
    return make("llama_gqa", layers=3)


def go_on(model, fed, cache):
    """Logits of tokens that are fed one by one at the positions where the cache goes on, and the cache."""
    outs = []
    for step in fed.split(1, 1):
        outs.append(model(step, past_key_values=cache, position_ids=cache.next_positions()).logits)
    return torch.cat(outs, 1), cache


# ---- the oracle ----


@pytest.mark.parametrize("pads", [(0, 0), (0, 9)])
@pytest.mark.parametrize("policy", ANY_SCHEDULE)
def test_every_policy(policy, pads):
    certain("llama_gqa", policy, 0.4, pads=pads, steps=11, every=4, **SMALL.get(policy, {}))


WAYS = [
    ("mistral_sliding", "h2o", 0.4, {"every": 7}),
    ("mpt", "roco", 0.4, {"every": 3, "positions": "renumbered"}),
    ("llama_gqa", "h2o", 0.4, {"every": 5, "positions": "renumbered", "pads": (0, 9)}),
    ("gptj", "keyformer", 0.4, {"every": 6, "schedule": "decode"}),
    ("llama_gqa", "h2o", 0.4, {"every": 3, "block": 7, "pads": (0, 4)}),
    ("llama_gqa", "h2o", 0.4, {"every": 3, "bits": 8}),
    ("llama_gqa", "keyformer", 0.4, {"every": 3, "shared": True, "damping": 0.9}),
    ("llama_gqa", "scissorhands", 34, {"every": 4}),
    ("llama_gqa", "h2o", 26, {"every": 4, "pads": (0, 9)}),
    ("llama_gqa", "roco", 0.4, {"every": 4, "wrap": ("adaptive",), "pads": (0, 9)}),
    ("llama_gqa", "h2o", 0.3, {"every": 12, "wrap": ("adaptive", "critical")}),
    ("llama_gqa", "h2o", 0.4, {"every": 3, "wrap": ("pyramid", "critical")}),
    ("llama_gqa", "roco", 0.4, {"every": 4, "wrap": ("global_topk",), "recent": 2, "protected": 0.2}),
    ("gpt2", "tova", 0.1, {"every": 8}),  # more at once than the budget holds
    ("llama_gqa", "h2o", [0.3, 12], {"every": 3, "dtype": torch.float32}),
]


@pytest.mark.parametrize(("name", "policy", "k", "options"), WAYS, ids=str)
def test_every_way(name, policy, k, options):
    certain(name, policy, k, **{"pads": (0, 0), "steps": 14, **options})


# ---- what is held, and when ----


@pytest.mark.usefixtures("no_gradients")
@pytest.mark.parametrize(("policy", "k", "pads"), SETTINGS, ids=str)
def test_held_tokens_rise_to_the_budget_and_m_minus_one_and_fall_back(model, policy, k, pads):
    ids, fed = prompt(2, 30), prompt(2, 14, seed=2)
    with kvpatch.patched(model, policy, k, every=5, strict=True) as patch:  # strict: invariants after every pass
        cache = patch.new_cache()
        force(model, ids, fed[:, :0], left_pad(ids, [30 - pad for pad in pads]), cache=cache)
        budget, held = [layer.keep_BH1[..., 0] for layer in cache.layers], [cache.held(layer) for layer in range(3)]
        for t in range(14):
            model(fed[:, t : t + 1], past_key_values=cache)
            for layer, most in enumerate(budget):
                held[layer] = torch.where(held[layer] + 1 == most + 5, most, held[layer] + 1)
                assert torch.equal(cache.held(layer), held[layer])
        assert patch.report().peak_nbytes >= 2 * 4 * 8 * sum(int(most.max()) + 5 for most in budget)  # of one row, K and V


@pytest.mark.usefixtures("no_gradients")
def test_steps_between_evictions_choose_nothing(model, monkeypatch):
    """And a stack of layers takes all steps, whose Call stays bound."""
    chosen, real = [], kvpatch.attention.decode.find_victims
    monkeypatch.setattr(kvpatch.attention.decode, "find_victims", lambda *given: chosen.append(given) or real(*given))
    for every, times in ((5, 3), (2, 7)):
        _, cache = run(model, prompt(2, 30), prompt(2, 15, seed=2), "h2o", 0.4, every=every)
        assert len(chosen) == times and cache.stacked
        chosen.clear()
    run(model, prompt(2, 30), prompt(2, 15, seed=2), ADAPTIVE, 0.4, every=5)
    assert len(chosen) == 3 * 3


@pytest.mark.usefixtures("no_gradients")
@pytest.mark.parametrize("policy", ["h2o", "keyformer", "critical(roco)", "window", "random"])
def test_stacked_layers_hold_what_single_ones_do(model, policy, monkeypatch):
    ids, fed = prompt(2, 30), prompt(2, 13, seed=2)
    got, cache = run(model, ids, fed, policy, 0.4, every=4)
    assert cache.stacked
    monkeypatch.setattr(kvpatch.attention.attend, "_find_stack", lambda *_: None)
    want, alone = run(model, ids, fed, policy, 0.4, every=4)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    assert kept(cache) == kept(alone)


# ---- caches that are copied, joined, saved and rolled back ----


@pytest.mark.usefixtures("no_gradients")
@pytest.mark.parametrize(("policy", "k", "pads"), SETTINGS, ids=str)
@pytest.mark.parametrize("right", [3, 7])
def test_rolling_back_over_evictions(model, policy, k, pads, right):
    ids, fed = prompt(2, 30), prompt(2, 16, seed=2)
    mask = left_pad(ids, [30 - pad for pad in pads])
    with kvpatch.patched(model, policy, k, every=4) as patch:
        want, plain = force(model, ids, fed, mask)
        cache = patch.new_cache()
        force(model, ids, fed[:, :right], mask, cache=cache)
        cache.activate_past_recording()
        go_on(model, prompt(2, 11, seed=9), cache)
        for tokens in (2, 5, 4):
            cache.crop(-tokens)
            cache.check_invariants()
        logits, _ = go_on(model, fed[:, right:], cache)
        cache.check_invariants()
    torch.testing.assert_close(want[:, right + 1 :], logits, atol=1e-5, rtol=0)
    assert kept(plain) == kept(cache)


def test_gradients_pass_through_steps(model):
    ids, fed = prompt(1, 20), prompt(1, 6, seed=2)
    with kvpatch.patched(model, "h2o", 7, every=3) as patch:
        cache = patch.new_cache()
        for step in (ids, *fed.split(1, 1)):
            logits = model(step, past_key_values=cache).logits
        logits.sum().backward()
        want, plain = force(model, ids, fed)
    model.zero_grad()
    torch.testing.assert_close(logits[:, -1].detach(), want[:, -1], atol=1e-5, rtol=0)
    assert kept(cache) == kept(plain)


# ---- other ways of a step ----


@pytest.mark.usefixtures("no_gradients")
@pytest.mark.parametrize(("policy", "k", "pads"), SETTINGS[::2], ids=str)
def test_compiled_steps_of_a_cache_with_room(model, policy, k, pads):
    ids, fed = prompt(2, 30), prompt(2, 9, seed=2)
    torch._dynamo.reset()
    with kvpatch.patched(model, policy, k, every=4) as patch:
        caches, outs = [patch.new_cache(room=9) for _ in range(2)], []
        for cache, step in zip(caches, (model, torch.compile(model.forward, fullgraph=True, backend="aot_eager")), strict=True):
            model(ids, past_key_values=cache)
            outs.append(torch.cat([step(fed[:, t : t + 1], past_key_values=cache).logits for t in range(9)], 1))
            cache.check_invariants()
        without_room = force(model, ids, fed)
    torch._dynamo.reset()
    torch.testing.assert_close(*outs, atol=2e-5, rtol=0)
    torch.testing.assert_close(outs[0], without_room[0][:, 1:], atol=2e-5, rtol=0)
    assert kept(caches[0]) == kept(caches[1]) == kept(without_room[1])


@pytest.mark.usefixtures("no_gradients")
@pytest.mark.parametrize("room", [None, 9])
def test_graphs(model, room):
    """Captured if there is room, ordinary steps if not."""
    ids, fed = prompt(2, 30), prompt(2, 9, seed=2)
    with kvpatch.patched(model, "h2o", 0.4, every=4) as patch:
        cache, graph = patch.new_cache(room=room), StepGraph(model, patch._state, FakeRecorder)
        model(ids, past_key_values=cache)
        outs = [graph(fed[:, t : t + 1], cache).clone() for t in range(9)]
        want, plain = force(model, ids, fed)
    assert (graph.replays > 0) == (room is not None)
    torch.testing.assert_close(torch.cat(outs, 1), want[:, 1:], atol=2e-5, rtol=0)
    assert kept(cache) == kept(plain)


@pytest.mark.usefixtures("no_gradients")
@pytest.mark.parametrize(("policy", "k", "pads"), slow_but(SETTINGS[:1], SETTINGS), ids=str)
def test_kernels_step_and_torch_evicts(model, policy, k, pads):
    pytest.importorskip("triton")
    ids, fed = prompt(2, 30), prompt(2, 9, seed=2)
    mask = left_pad(ids, [30 - pad for pad in pads])
    got, cache = run(model, ids, fed, policy, k, mask, every=4, backend="triton")
    want, plain = run(model, ids, fed, policy, k, mask, every=4, backend="torch")
    assert any("at once" in why for _, why in cache.backend_choice.ran_last.values())
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    assert kept(cache) == kept(plain)


def test_generate_with_beams_and_drafts(model):
    """A draft's rejected tokens are taken back over evictions."""
    ids = prompt(1, 24)
    with kvpatch.patched(model, "h2o", 9, every=4) as patch:
        plain = model.generate(ids, max_new_tokens=14, do_sample=False)
        drafted = model.generate(ids, max_new_tokens=14, do_sample=False, prompt_lookup_num_tokens=3)
        model.generate(ids, max_new_tokens=9, num_beams=3, do_sample=False)
        assert max(len(set(head.tolist())) for layer in patch.report().positions for row in layer for head in row) <= 9 + 4
    assert torch.equal(plain, drafted)


# ---- the door ----


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("h2o", {"every": 0}, "every=0 must be a number of tokens that decode steps evict at once, at least 1"),
        ("h2o", {"every": 2.0}, "every=2.0 must be a number"),
        ("h2o", {"every": True}, "every=True must be a number"),
        ("h2o", {"every": 33}, "every=33 evicts more tokens at once than the budget of 32 keeps: give every=32 or less"),
        ("snapkv", {"every": 2}, "every=2 is for policies that evict while decoding.*leave every out"),
        ("h2o", {"every": 2, "schedule": "prompt"}, "use schedule='both'"),
        ("full", {"every": 2}, "never evicts"),
        ("h2o", {"evry": 2}, "Did you mean 'every'"),
    ],
)
def test_refused(model, policy, options, message):
    with pytest.raises(KVPatchError, match=message):
        kvpatch.patch(model, policy, 32, **options)


def test_a_size_in_bytes_counts_what_waits(model):
    for every, tokens in ((1, 40), (5, 36)):
        with kvpatch.patched(model, "h2o", f"{40 * 3 * 2 * 2 * 8 * 4}B", every=every) as patch:
            assert patch._state.settings.budget.per_layer == (tokens,) * 3
    with pytest.raises(KVPatchError, match="and 40 more wait to be evicted with it"):
        kvpatch.patch(model, "h2o", f"{40 * 3 * 2 * 2 * 8 * 4}B", every=41)


def test_caches_of_another_rhythm_are_told_apart(model, tmp_path):
    with kvpatch.patched(model, "h2o", 9, every=4) as patch:
        patch.save_cache(feed(model, patch, prompt(1, 20)), tmp_path / "cache")
    with kvpatch.patched(model, "h2o", 9) as patch, pytest.raises(KVPatchError, match="every"):
        patch.load_cache(tmp_path / "cache")


# ---- the arithmetic ----


def test_moves_leave_what_stays_in_front():
    torch.manual_seed(0)
    for used, M in ((9, 3), (5, 4), (8, 1), (6, 6)):
        gone = torch.rand(2, 3, used).argsort(-1)[..., :M]
        into, out = rhythm.list_moves(gone, used)
        column = torch.arange(used).expand(2, 3, used).clone()
        moved = column.scatter(2, into, column.gather(2, out))[..., : used - M]
        for b in range(2):
            for h in range(3):
                assert sorted(moved[b, h].tolist()) == sorted(set(range(used)) - set(gone[b, h].tolist()))


def test_steps_are_counted():
    waits = rhythm.list_steps_to_eviction([10, 10, 7], [14, 14, 14])
    for step in range(1, 20):
        after = {4 - step % 4, 7 - step if step < 7 else 4 - (step - 7) % 4}
        assert rhythm.advance_waits(waits, step, 4) == tuple(sorted(after))
