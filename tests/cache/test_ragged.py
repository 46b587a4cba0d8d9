"""Layers whose heads hold different numbers of tokens: the laws of dense layers, and memory that is really freed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpatch
from kvpatch.backends.head_offsets import HeadOffsets
from tests.helpers.comparing import agrees, certain, combined
from tests.helpers.running import RAGGED, go_on, uneven
from tests.helpers.tiny import FIVE, force, make, prompt


@pytest.fixture(params=RAGGED)
def policy(request):
    return RAGGED[request.param]


def test_heads_differ_and_their_sum_is_the_budget(policy):
    model, ids = make("llama_gqa"), prompt(2, 60)
    with torch.no_grad(), kvpatch.patched(model, policy, 0.4):
        cache = model(ids).past_key_values
    held = torch.stack([uneven(cache).held(layer) for layer in range(2)])
    shared = held.sum((0, 2)) if policy.over_model else held.sum(-1)
    assert shared.unique().tolist() == [96 if policy.over_model else 48]
    assert not policy.over_model or len(held.sum(-1).unique()) > 1
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FIVE)
def test_half_precision(name, dtype, policy):
    """Close to the same model in float32 while both keep the same tokens: right after the prompt, which is exact in both."""
    if policy.merging is not None:
        pytest.skip("a masked model has no changed values")
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
        keys = backend.Keys(keys.k_BHTD, keys.v_BHTD, masked, True, keys.columns_before, False)
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
    rows = head_offsets.pack_entries(padded, index, kept_BHK)
    assert len(rows) == sum(heads) + 2 * H
    assert sorted(rows[rows > 0].tolist()) == padded[kept_BHK].flatten().tolist()
    chosen = torch.tensor([i % H for i in order])
    one, at = head_offsets.select_heads(chosen)
    grown = HeadOffsets([capacity + 3 for capacity in one.capacities], one.filled, at.device)
    moved = one.move(rows[at], grown)
    back = grown.unpack_entries(moved, 1, len(order))
    assert len(moved) == sum(heads[i] + 5 for i in chosen.tolist())
    cut = HeadOffsets([heads[i] for i in chosen.tolist()], grown.filled, at.device)
    assert torch.equal(cut.unpack_entries(grown.move(moved, cut), 1, len(order)), back[:, :, : cut.width])
    assert torch.equal(back[:, :, : cut.width], (padded * kept_BHK[..., None])[:, chosen, : cut.width])
    assert grown.width == cut.width + 5 and not back[:, :, cut.width :].any()


@settings(max_examples=80)
@given(
    heads=st.lists(st.integers(1, 30) | st.integers(31, 200), min_size=1, max_size=9),
    G=st.integers(1, 3),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    seed=st.integers(0, 9),
)
def test_products_and_sums_over_blocks_are_those_of_each_head(heads, G, dtype, seed):
    """Blocks end where they may: in a head, between two, or with many in one; the last one is shorter."""
    random = torch.Generator().manual_seed(seed)
    N, F, wide = len(heads), sum(heads), torch.promote_types(dtype, torch.float32)
    offsets = HeadOffsets(heads, heads, torch.device("cpu"))
    k, v = (torch.randn(F, D, generator=random).to(dtype) for D in (5, 4))
    q, p = torch.randn(N, G, 5, generator=random).to(wide), torch.rand(N, G, max(heads), generator=random).to(wide)
    products, mixed = offsets.multiply_keys(q, k), offsets.mix_values(p, v)
    assert (products.shape, mixed.shape) == ((N, G, max(heads)), (N, G, 4))
    assert products.isfinite().all()
    for n, capacity in enumerate(heads):
        own = slice(int(offsets.begin_N[n]), int(offsets.begin_N[n]) + capacity)
        torch.testing.assert_close(products[n, :, :capacity], q[n] @ k[own].to(wide).T)
        torch.testing.assert_close(mixed[n], p[n, :, :capacity] @ v[own].to(wide))


def test_a_head_takes_nothing_from_its_neighbours():
    """Not even zero times a value that is NaN."""
    heads = [70, 3, 40, 5, 64, 1, 90]
    offsets, random = HeadOffsets(heads, heads, torch.device("cpu")), torch.Generator().manual_seed(0)
    q, p = torch.randn(7, 2, 4, generator=random), torch.rand(7, 2, 90, generator=random)
    k, v = torch.randn(2, sum(heads), 4, generator=random)
    for n, capacity in enumerate(heads):
        begin = int(offsets.begin_N[n])
        broken_k, broken_v = (torch.full_like(t, torch.nan) for t in (k, v))
        broken_k[begin : begin + capacity], broken_v[begin : begin + capacity] = (t[begin : begin + capacity] for t in (k, v))
        own = (slice(None), slice(capacity))
        assert torch.equal(offsets.multiply_keys(q, broken_k)[n][own], offsets.multiply_keys(q, k)[n][own])
        assert torch.equal(offsets.mix_values(p, broken_v)[n], offsets.mix_values(p, v)[n])


def test_small_waste_stays_dense():
    """A layer stays dense if dense slots waste next to nothing: one attention call instead of several."""
    model, ids = make("llama_gqa"), prompt(1, 60)
    with torch.no_grad(), kvpatch.patched(model, combined("h2o", ("adaptive",)), 0.4, floor=1.0):
        cache = model(ids).past_key_values
    assert all(layer.kv.appends for layer in cache.layers)
    assert agrees("llama_gqa", "h2o", 0.4, wrap=("adaptive",), floor=1.0)
