"""Layers whose heads hold different numbers of tokens: the laws of dense layers, and memory that is really freed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpatch
from kvpatch.backends.head_offsets import HeadOffsets
from tests.helpers.comparing import agrees, certain, combined
from tests.helpers.running import RAGGED, go_on, kept, uneven
from tests.helpers.tiny import FIVE, force, left_pad, make, prompt


@pytest.fixture(params=RAGGED)
def policy(request):
    return RAGGED[request.param]


def test_heads_differ_and_their_sum_is_the_budget(policy):
    model, ids = make("llama_gqa"), prompt(2, 60)
    with torch.no_grad(), kvpatch.patched(model, policy, 0.4):
        cache = model(ids).past_key_values
    held = torch.stack([uneven(cache).held(layer) for layer in range(2)])
    assert held.sum(-1).unique().tolist() == [48]
    assert len(held.unique()) > 2


def test_nothing_moves_while_there_is_room(policy):
    """A token is written into its slot; keys and values stay where they are."""
    model, ids, fed = make("llama_gqa"), prompt(2, 60), prompt(2, 8, seed=2)
    with kvpatch.patched(model, policy, 0.4) as patch:
        cache = patch.new_cache()
        force(model, ids, fed[:, :0], cache=cache)
        before = [(layer.keys.data_ptr(), layer.keys.clone()) for layer in uneven(cache).layers]
        go_on(model, fed, cache)
        for layer, (pointer, keys) in zip(cache.layers, before, strict=True):
            assert layer.keys.data_ptr() == pointer
            changed = (layer.keys != keys).any(-1).sum()
            assert 4 <= changed <= 4 * 8


def test_long_texts_agree_with_the_oracle():
    """Past the slack, where a layer that does not evict makes room and moves."""
    certain("llama_gqa", "adakv", 0.4, steps=70, window=5, kernel=3)
    certain("mpt", "h2o", 0.4, steps=40, wrap=("adaptive", "critical"))


@pytest.mark.spread
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FIVE)
def test_half_precision(name, dtype, policy):
    """Close to the same model in float32 while both keep the same tokens: right after the prompt, which is exact in both."""
    ids, fed = prompt(2, 40), prompt(2, 1, seed=2)
    half, single = make(name, dtype=dtype), make(name)
    single.load_state_dict(half.state_dict())
    with kvpatch.patched(half, policy, 1.0), kvpatch.patched(single, policy, 1.0):
        exact = (force(half, ids, fed)[0].float() - force(single, ids, fed)[0]).abs().mean()
    with kvpatch.patched(half, policy, 0.25):
        _, cache = force(half, ids, fed[:, :0])
        wanted = force_over(single, ids, fed, cache)
        logits, _ = go_on(half, fed, uneven(cache))
    assert cache.layers[0].keys.dtype == dtype
    assert torch.isfinite(logits).all()
    assert (logits[:, -1].float() - wanted).abs().mean() < 4 * exact + 1e-3


def force_over(model, ids, fed, cache):
    """The logits of `fed`'s one token when attention sees the tokens that `cache` holds and itself: by a float mask."""
    import kvpatch.backends.torch_backend as backend

    held, whole = [cache.positions(layer) for layer in range(2)], backend.step

    def step(q, keys, newest, geometry, probabilities, buffer=None):
        allowed = (keys.positions_BHT[..., None] == held[step.layer][:, :, None]).any(-1) | (keys.positions_BHT == newest)
        step.layer += 1
        masked = keys.positions_BHT.masked_fill(~allowed, -1)
        keys = backend.Keys(keys.k_BHTD, keys.v_BHTD, masked, True, keys.past, False)
        return whole(q, keys, newest, geometry, probabilities, buffer)

    with pytest.MonkeyPatch.context() as patch, kvpatch.patched(model, "window", 1.0), torch.no_grad():
        past, step.layer = model(ids, use_cache=True).past_key_values, 0
        patch.setattr(backend, "step", step)
        return model(fed, past_key_values=past).logits[:, 0]


@settings(max_examples=60)
@given(
    heads=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    order=st.lists(st.integers(0, 7), min_size=1, max_size=8),
)
def test_head_offsets_pack_select_grow_and_unpack(heads, order):
    """Entries of a head's segment come out of it as they went in, whatever happens to the segments in between."""
    H, K = len(heads), max(heads)
    padded = torch.arange(H * K, dtype=torch.float32).view(1, H, K, 1) + 1
    index = torch.arange(K).expand(1, H, K)
    kept_BHK = index < torch.tensor(heads)[None, :, None]
    head_offsets = HeadOffsets([n + 2 for n in heads], heads, torch.device("cpu"))
    rows = head_offsets.pack(padded, index, kept_BHK)
    assert len(rows) == sum(heads) + 2 * H
    assert sorted(rows[rows > 0].tolist()) == padded[kept_BHK].flatten().tolist()
    chosen = torch.tensor([i % H for i in order])
    one, at = head_offsets.select(chosen)
    grown = one.resized([capacity + 3 for capacity in one.capacities], one.filled)
    moved = one.move(rows[at], grown)
    back = grown.unpack(moved, 1, len(order), K + 5)
    assert len(moved) == sum(heads[i] + 5 for i in chosen.tolist())
    cut = grown.resized([heads[i] for i in chosen.tolist()], grown.filled)
    assert torch.equal(cut.unpack(grown.move(moved, cut), 1, len(order), K + 5), back)
    assert torch.equal(back[:, :, :K], (padded * kept_BHK[..., None])[:, chosen])
    assert not back[:, :, K:].any()


def test_many_heads_make_few_runs():
    sizes = torch.randint(200, 2000, (512,), generator=torch.Generator().manual_seed(0)).tolist()
    head_offsets = HeadOffsets(sizes, sizes, torch.device("cpu"))
    assert len(head_offsets.runs) < 120
    assert head_offsets.rows < 1.02 * sum(sizes)


def test_small_waste_stays_dense():
    """A layer stays dense if dense slots waste next to nothing: one attention call instead of several."""
    model, ids = make("llama_gqa"), prompt(1, 60)
    with torch.no_grad(), kvpatch.patched(model, combined("h2o", ("adaptive",)), 0.4, floor=1.0):
        cache = model(ids).past_key_values
    assert all(layer.kv.appends for layer in cache.layers)
    assert agrees("llama_gqa", "h2o", 0.4, wrap=("adaptive",), floor=1.0)


@pytest.mark.parametrize("name", FIVE)
def test_small_layers_padded_for_a_step_give_the_same(name, policy, monkeypatch):
    """Many short heads are padded for one call; a call for each length gives the same."""
    import kvpatch.backends.torch_backend as backend

    model, ids, fed, outs = make(name), prompt(6, 40), prompt(6, 6, seed=2), []
    mask = left_pad(ids, [40, 36, 32, 28, 24, 20])
    for small in (backend.SMALL, 0):
        monkeypatch.setattr(backend, "SMALL", small)
        with kvpatch.patched(model, policy, 0.25):
            outs.append(force(model, ids, fed, mask))
    assert any(len(layer.kv.head_offsets.runs) > 4 for layer in uneven(outs[0][1]).layers if layer.kv.head_offsets)
    torch.testing.assert_close(outs[0][0], outs[1][0], atol=3e-5, rtol=0)
    assert kept(outs[0][1]) == kept(outs[1][1])
