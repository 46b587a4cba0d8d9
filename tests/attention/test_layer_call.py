"""One layer's queries, keys and values as attention takes them."""

import contextlib
import dataclasses

import pytest
import torch

import kvpatch
from kvpatch.attention.compress import _are_equal
from kvpatch.attention.layer_call import Call
from kvpatch.policies.parallel import Parallel
from tests.helpers.running import N, read
from tests.helpers.tiny import make, prompt

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture(scope="module")
def model():
    return make("llama_gqa")


def test_values_of_another_dtype_are_taken_as_the_cache_s(model):
    """Autocast turns projections into half precision and leaves what rotary positions touch."""

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


def test_a_case_names_a_window_and_a_past_only_where_they_count():
    """A kernel that cannot take one is passed over, so a case must not name what the call has no use for."""
    model, seen = make("mistral_sliding"), {}
    wide = model.config.sliding_window
    with kvpatch.patched(model, "snapkv", 0.5) as patch:
        for pieces in ((wide,), (wide + 1,), (3, 4)):
            cache = patch.new_cache()
            cache.plans.prompt_len = sum(pieces)
            cases = []
            choose = cache.backend_choice.of
            cache.backend_choice.of = lambda task, case, choose=choose, cases=cases: (
                cases.append((task, case)) or choose(task, case)
            )
            for number in (*pieces, 1):
                model(prompt(1, number), past_key_values=cache)
            seen[pieces] = {(task, case.window, case.past) for task, case in cases}
    assert ("prompt", False, False) in seen[wide,] and ("prompt", True, False) not in seen[wide,]
    assert ("prompt", True, False) in seen[wide + 1,] and ("prompt", False, False) not in seen[wide + 1,]
    assert {(task, past) for task, _, past in seen[3, 4]} >= {("prompt", False), ("prompt", True), ("statistics", True)}
    assert all(not past for task, _, past in seen[wide,] if task in ("prompt", "statistics", "decode"))


def test_a_score_that_layers_share_grows_with_the_text():
    """By steps, and by a later prompt that is longer than the room it gets ahead."""
    model, options = make("llama_gqa"), {"shared": True, "noise": "none"}
    with kvpatch.patched(model, "keyformer", 9, **options) as patch:
        cache, seen = patch.new_cache(), 0
        for count in (300, 1, 1, 200, 1):
            model(prompt(1, count), past_key_values=cache)
            seen += count
            cache.check_invariants()
            assert seen < cache.shared_score.shape[-1] <= seen + 1 + seen // 4 + 64
            assert (cache.shared_score[..., seen] > 0).all()  # the newest token attends to itself


def test_a_layer_below_its_budget_evicts_only_where_other_processes_may(model):
    """Their eviction may need all of them; with one process it would be work for nothing."""
    cache = read(model, "h2o", 0.5, steps=1)
    call = cache.steps.calls[0]
    for processes, unfilled, evicting in ((1, False, True), (1, True, False), (2, True, True), (2, False, True)):
        cache.settings = dataclasses.replace(cache.settings, parallel=Parallel(processes))
        cache.layers[0].mode.all_heads_short = unfilled
        assert Call(cache, call.now, 0, call.bound_adapter, call.group, call.device).evicting == evicting


def test_heads_are_alike_if_all_of_all_rows_are():
    same, rows, heads = [[3, 3], [3, 3]], [[3, 3], [4, 4]], [[3, 4], [3, 4]]
    assert _are_equal(same) and not _are_equal(rows) and not _are_equal(heads)


def test_a_case_names_the_size_of_values(model):
    """The kernels of a step refuse values that are no longer or shorter than keys: they read both by one size."""
    cache = read(model, "h2o", 0.5)
    call = cache.steps.calls[0]
    keys = call.keys(call.slots.columns_used)
    q_BHGD = torch.empty(1, 2, 2, keys.k_BHTD.shape[-1])
    longer = dataclasses.replace(keys, v_BHTD=torch.cat([keys.v_BHTD, keys.v_BHTD], -1))
    sizes = [call.case("decode", q_BHGD, one).value_dim for one in (keys, longer)]
    assert sizes == [q_BHGD.shape[-1], 2 * q_BHGD.shape[-1]]
