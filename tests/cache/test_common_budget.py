"""One budget for the heads of all layers: what is freed, when, and what a cache of it goes through."""

import gc
import weakref

import pytest
import torch

import kvpatch
from tests.helpers.running import kept, uneven
from tests.helpers.tiny import force, left_pad, make, prompt

SNAPKV = {"window": 5, "kernel": 3}
pytestmark = pytest.mark.usefixtures("no_gradients")


def read(model, ids, k=0.3, mask=None, policy="global_topk(snapkv)", **options):
    options = SNAPKV | options if "snapkv" in policy else options
    with kvpatch.patched(model, policy, k, **options) as patch:
        return model(ids, attention_mask=mask, past_key_values=patch.new_cache(), use_cache=True).past_key_values


@pytest.mark.parametrize("floor", [0.0, 0.2, 0.7])
def test_the_total_of_each_row_is_exact_and_freed(floor):
    """Layers hold different numbers of tokens, memory is their sum, and no head is below its floor."""
    model, ids, lengths = make("llama_gqa", layers=4), prompt(3, 200), [200, 170, 120]
    cache = uneven(read(model, ids, mask=left_pad(ids, lengths), floor=floor))
    held = torch.stack([cache.held(layer) for layer in range(4)], 1)  # [B,L,H]
    budgets = [int(0.3 * n + 1e-6) for n in lengths]
    assert held.sum((1, 2)).tolist() == [b * 4 * 2 for b in budgets]
    assert len(held.sum(-1)[0].unique()) > 1
    for row, b in zip(held, budgets, strict=True):
        assert int(row.min()) >= max(int(floor * b), 5)
    per_token = 2 * 8 * 4  # keys and values of 8 numbers
    used, slots = int(held.sum()), sum(sum(layer.kv.capacities()) for layer in cache.layers)
    assert cache.nbytes == slots * per_token
    assert slots <= used + max(used // 16, 8 * 4 * 6) + held.numel()


def test_padded_rows_are_as_alone():
    model, ids = make("llama_gqa", layers=3), prompt(2, 60)
    whole = kept(read(model, ids, mask=left_pad(ids, [60, 41])))
    alone = kept(read(model, ids[1:, 19:]))
    assert [layer[1] for layer in whole] == [layer[0] for layer in alone]


def test_the_ranking_is_over_all_layers():
    """Every kept token outranks every one that is not, wherever both are, but for floor and protection."""
    model, ids = make("llama_gqa", layers=3), prompt(1, 80)
    cache = read(model, ids, policy="global_topk(key_norm)", floor=0.0)
    full = read(model, ids, k=1.0, policy="key_norm")
    norms = torch.stack([layer.keys.norm(dim=-1)[0] for layer in full.layers])
    here = torch.zeros_like(norms, dtype=torch.bool)
    for l, layer in enumerate(kept(cache)):
        for h, positions in enumerate(layer[0]):
            here[l, h, positions] = True
    assert here.sum() == 24 * 6
    assert norms[here].max() < norms[~here].min()


def test_a_cache_goes_on_after_it_was_saved(tmp_path):
    model, ids, fed = make("llama_gqa"), prompt(2, 50), prompt(2, 12, seed=2)
    for policy in ("critical(global_topk(roco))", "critical(global_topk(snapkv))"):
        with kvpatch.patched(model, policy, 0.4, **(SNAPKV if "snapkv" in policy else {})) as patch:
            cache = force(model, ids, fed[:, :3])[1]
            patch.save_cache(cache, tmp_path / "cache.safetensors")
            loaded = patch.load_cache(tmp_path / "cache.safetensors")
            for past in (cache, loaded):
                past.check_invariants()
            outs = [force_on(model, fed[:, 3:], past) for past in (cache, loaded)]
            # a later prompt reads what was stored with the tokens
            outs += [force_on(model, prompt(2, 30, seed=5), past, at_once=True) for past in (cache, loaded)]
        assert torch.equal(outs[0], outs[1])
        assert torch.equal(outs[2], outs[3])
        assert kept(cache) == kept(loaded)


def force_on(model, fed, past, at_once=False):
    pieces = [fed] if at_once else fed.split(1, 1)
    return torch.cat([model(piece, past_key_values=past).logits for piece in pieces], 1)


def test_a_layer_of_another_budget_may_not_hold_the_others(tmp_path):
    model = make("llama_gqa")
    with kvpatch.patched(model, "global_topk(h2o)", 10) as patch:
        cache = force(model, prompt(1, 40), prompt(1, 2, seed=2))[1]
        cache.layers[0].keep_BH1 += 30
        with pytest.raises(Exception, match="keep_BH1 of all layers is over their budget"):
            cache.check_invariants()
        patch.remove()


def test_a_cache_is_freed_with_its_last_user():
    """Layers that waited let the cache go, as all do."""
    model = make("llama_gqa", layers=3)
    gc.disable()
    try:
        seen = weakref.ref(read(model, prompt(1, 40)))
        assert seen() is None
    finally:
        gc.enable()


def test_weights_of_a_layer_are_not_needed_after_it():
    """accelerate offloads a layer's weights when it has run, so norms of projected values are computed before."""
    model, ids = make("llama_gqa", layers=3), prompt(1, 60)
    want = kept(read(model, ids, policy="critical(global_topk(snapkv))"))
    hooks = []
    for layer in model.model.layers:
        weight = layer.self_attn.o_proj.weight

        def unload(*_, weight=weight):
            weight.data = torch.full_like(weight, torch.nan)

        hooks.append(layer.register_forward_hook(unload))
    assert kept(read(model, ids, policy="critical(global_topk(snapkv))")) == want
    for hook in hooks:
        hook.remove()


def test_the_peak_is_the_whole_prompt():
    model, ids = make("llama_gqa", layers=4), prompt(1, 300)
    per_layer = 300 * 2 * 2 * 8 * 4
    peaks = {policy: read(model, ids, k=0.2, policy=policy).meter.peak for policy in ("adakv", "global_topk(snapkv)")}
    assert 4 * per_layer <= peaks["global_topk(snapkv)"] <= 5 * per_layer
    assert peaks["adakv"] < 2.2 * per_layer


def test_refused_where_layers_cannot_wait():
    model, ids = make("llama_gqa"), prompt(1, 30)
    with pytest.raises(kvpatch.KVPatchError, match=r"block=8: policy 'global_topk_h2o' has one budget for all layers"):
        kvpatch.patch(model, "global_topk(h2o)", 0.5, block=8)
    with pytest.raises(kvpatch.KVPatchError, match="divides its budget over heads where the prompt ends"):
        kvpatch.policies.global_topk("h2o", schedule="decode")
    for inner in ("adakv", "global_topk(h2o)"):
        outer = "global_topk" if inner == "adakv" else "adaptive"
        with pytest.raises(kvpatch.KVPatchError, match="shares a budget by"):
            kvpatch.get_policy(f"{outer}({inner})")
    with kvpatch.patched(model, "global_topk(h2o)", 0.5) as patch:
        cache = patch.new_cache()
        cache.plans.prompt_len = 28
        with pytest.raises(kvpatch.KVPatchError, match="2 generated tokens in one pass with the prompt"):
            model(ids, past_key_values=cache)
        assert not cache.unfinished
