"""Bound steps: the layers between the first and the last of a decode step, beside the whole way through all layers."""

import copy

import pytest
import torch

import kvpatch
from kvpatch.attention import bound_step
from kvpatch.attention.bound_step import FusedByKernels, FusedByTorch, Unbound
from tests.helpers.comparing import EVICTING
from tests.helpers.marks import slow_but
from tests.helpers.running import kept
from tests.helpers.tiny import force, left_pad, make, prompt

pytestmark = pytest.mark.usefixtures("no_gradients")
N, LAYERS = 20, 4


@pytest.fixture(scope="module")
def model():
    return make("llama_gqa", layers=LAYERS)


@pytest.fixture
def taken(monkeypatch):
    """The class of each bound step that is taken."""
    found = []
    for cls in (FusedByTorch, FusedByKernels, Unbound):

        def noted(self, *given, call=cls.__call__, name=cls.__name__):
            found.append(name)
            return call(self, *given)

        monkeypatch.setattr(cls, "__call__", noted)
    return found


def both_ways(model, monkeypatch, run, policy, k, **options):
    """Logits and kept positions of `run(cache)` with bound steps, and by the whole way."""
    found = []
    for whole in (False, True):
        with monkeypatch.context() as context, kvpatch.patched(model, policy, k, **options) as patch:
            if whole:
                context.setattr(bound_step, "bind_steps", lambda *_: None)
            cache = patch.new_cache()
            logits = run(cache)
            cache.check_invariants()
            found.append((logits, kept(cache)))
    return found


def agree(found, exactly=True):
    (logits, positions), (others, theirs) = found
    torch.testing.assert_close(logits, others, atol=0 if exactly else 1e-6, rtol=0)
    assert positions == theirs


CRITICAL = [kvpatch.get_policy(f"critical({base})") for base in ("keyformer", "roco")]
CASES = [kvpatch.get_policy("full"), *(kvpatch.get_policy(p) if isinstance(p, str) else p for p in EVICTING), *CRITICAL]


@pytest.mark.filterwarnings("error:An output with one or more elements was resized")
@pytest.mark.parametrize("policy", CASES, ids=lambda policy: policy.name)
def test_bound_steps_are_the_steps(model, policy, taken, monkeypatch):
    """Bit for bit, also past the room that a prompt leaves, and behind a second prompt, where slots may be empty."""

    def run(cache):
        first, _ = force(model, prompt(2, N), prompt(2, 12, seed=2), cache=cache)
        more, _ = force(model, prompt(2, 3, seed=3), prompt(2, 4, seed=4), cache=cache)
        return torch.cat([first, more], 1)

    found = both_ways(model, monkeypatch, run, policy, 0.5)
    agree(found)
    assert {"FusedByTorch"} >= set(taken) - {"Unbound"}
    unbound = ("key_norm", "key_diff", "cur", "kvzip", "kvzip_plus", "layer_defensive", "compactor")
    unbound += ("adakv", "critical_adakv", "defensive_snapkv")  # whose heads differ, since the window yields to the score
    assert (set(taken) == {"Unbound"}) == (policy.name in unbound)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("policy", ["full", "h2o", "keyformer"])
def test_bound_steps_over_rounded_entries(model, policy, bits, taken, monkeypatch):
    def run(cache):
        return force(model, prompt(2, N), prompt(2, 12, seed=2), cache=cache)[0]

    agree(both_ways(model, monkeypatch, run, policy, 0.5, bits=bits))
    assert "FusedByTorch" in taken


@pytest.mark.parametrize("policy", slow_but((), ("h2o", "keyformer", "roco", "critical(h2o)", "snapkv")))
def test_bound_steps_of_kernels(model, policy, taken, monkeypatch):
    pytest.importorskip("triton")
    options = {"window": 4} if policy == "snapkv" else {}

    def run(cache):
        return force(model, prompt(2, N), prompt(2, 5, seed=2), cache=cache)[0]

    agree(both_ways(model, monkeypatch, run, policy, 0.5, backend="triton", **options))
    # the first launch of a layer, which may fail, takes the whole way
    assert set(taken) - {"Unbound"} == {"FusedByKernels"}


def _rolled_back(model, cache):
    cache.activate_past_recording()
    force(model, prompt(2, N), prompt(2, 4, seed=2), cache=cache)
    cache.crop(-2)


def _reordered(model, cache):
    force(model, prompt(2, N), prompt(2, 4, seed=2), cache=cache)
    cache.reorder_cache(torch.tensor([1, 1]))


def _selected(model, cache):
    force(model, prompt(3, N), prompt(3, 4, seed=2), cache=cache)
    cache.batch_select_indices(torch.tensor([0, 2]))


def _inferred(model, cache):
    with torch.inference_mode():
        force(model, prompt(2, N), prompt(2, 9, seed=2), cache=cache)


def _padded(model, cache):
    ids = prompt(2, N)
    force(model, ids, prompt(2, 1, seed=2), left_pad(ids, [N, N - 5]), cache=cache)


def _drafts(model, cache):
    force(model, prompt(2, N), prompt(2, 4, seed=2), cache=cache)
    model(prompt(2, 2, seed=6), past_key_values=cache)


@pytest.mark.parametrize("before", [_rolled_back, _reordered, _selected, _inferred, _padded, _drafts])
@pytest.mark.parametrize("policy", ["full", "roco", "critical(keyformer)"])
def test_whatever_happens_between_steps(model, policy, before, monkeypatch):
    def run(cache):
        before(model, cache)
        steps = prompt(2, 5, seed=7)
        return torch.cat([model(steps[:, t : t + 1], past_key_values=cache).logits for t in range(5)], 1)

    agree(both_ways(model, monkeypatch, run, policy, 0.5))


@pytest.mark.parametrize("name", ["mpt", "mistral_sliding", "gptj", "gpt2"])
@pytest.mark.parametrize("policy", ["full", "h2o"])
def test_other_architectures(name, policy, monkeypatch):
    other = make(name, layers=3)
    agree(both_ways(other, monkeypatch, lambda cache: force(other, prompt(1, N), prompt(1, 4), cache=cache)[0], policy, 0.5))


def test_half_precision_is_not_bound(taken):
    half = make("llama_gqa", layers=3, dtype=torch.bfloat16)
    with kvpatch.patched(half, "h2o", 0.5):
        force(half, prompt(1, N), prompt(1, 4))
    assert set(taken) == {"Unbound"}


def test_gradients_and_autocast_take_the_whole_way(model, taken):
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        cache = patch.new_cache()
        force(model, prompt(1, N), prompt(1, 3), cache=cache)
        seen = len(taken)
        assert seen
        with torch.enable_grad():
            model(prompt(1, 1), past_key_values=cache)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(prompt(1, 1), past_key_values=cache)
        assert len(taken) == seen
        model(prompt(1, 1), past_key_values=cache)
        assert len(taken) == seen + LAYERS - 2


def test_another_model_is_not_the_one_that_was_bound(model, taken):
    """A copy of the model with other weights continues the cache."""
    other = make("llama_gqa", layers=LAYERS, seed=5)
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        cache = patch.new_cache()
        force(model, prompt(1, N), prompt(1, 3), cache=cache)
        attn = other.model.layers[1].self_attn
        step = cache.steps.bound[1]
        q = torch.zeros(1, 4, 1, 8)
        assert step.takes_call(model.model.layers[1].self_attn, q) and not step.takes_call(attn, q)
        assert not step.takes_call(model.model.layers[1].self_attn, q.double())


def test_a_cloned_cache_steps_alike(model):
    with kvpatch.patched(model, "roco", 0.5) as patch:
        cache = patch.new_cache()
        force(model, prompt(1, N), prompt(1, 3), cache=cache)
        twin = copy.deepcopy(cache)
        outs = [model(prompt(1, 1, seed=s), past_key_values=one).logits for one in (cache, twin) for s in (3, 4, 5)]
    for mine, theirs in zip(outs[:3], outs[3:], strict=True):
        torch.testing.assert_close(mine, theirs, atol=0, rtol=0)
    assert kept(cache) == kept(twin)


def test_copies_hold_nothing_of_the_model(model, monkeypatch):
    """Bound steps do: their modules would be copied with the weights."""
    with kvpatch.patched(model, "roco", 0.5) as patch:
        cache = patch.new_cache()
        force(model, prompt(2, N), prompt(2, 3), cache=cache)
        assert any(cache.steps.running)

        def refuse(*args):
            raise AssertionError("a weight is copied")

        monkeypatch.setattr(torch.nn.Parameter, "__deepcopy__", refuse)
        for twin in (cache.clone(), cache.select_rows([1])):
            assert twin.get_seq_length() == cache.get_seq_length()


def test_norms_of_tokens_that_are_appended_are_kept(model, monkeypatch):
    """The next prompt's end chooses among them, after the layer's weights may have been offloaded."""
    norms = []

    def run(cache):
        logits, _ = force(model, prompt(1, N), prompt(1, 5, seed=2), cache=cache)
        norms.append([layer.state["norm"][:, :, : layer.columns_used].clone() for layer in cache.layers])
        return logits

    agree(both_ways(model, monkeypatch, run, kvpatch.critical(kvpatch.global_topk("snapkv")), 60, window=4))
    for one, other in zip(*norms, strict=True):
        assert one.shape[2] == N + 5 and (one > 0).all()
        torch.testing.assert_close(one, other)
