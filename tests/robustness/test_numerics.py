"""Numbers at their limits: NaN and infinity, float16's range, one token, a hundred thousand positions, a million rows."""

import pytest
import torch

import kvpatch
from kvpatch.backends import torch_backend, value_norms
from kvpatch.backends.protocol import Geometry, Keys
from kvpatch.policies.context import Block, EvictionContext, Limits
from kvpatch.policies.needs import NoisySums
from kvpatch.policies.scopes import DeviationScope
from kvpatch.policies.selection import TwoStage, find_victims, score_keys
from kvpatch.policies.statistics import STATISTICS
from tests.helpers.comparing import EVICTING, ONCE, SMALL, WINDOWED, certain, sorted_positions
from tests.helpers.marks import slow_but
from tests.helpers.tiny import FIVE, force, left_pad, make, prompt

NAN, INF = torch.nan, torch.inf
SCORED = tuple(name for name in EVICTING if name not in ONCE)


def nan(negative=False):
    """NaN with either sign: x86 makes negative ones (0 / 0), literals are positive."""
    return torch.tensor([-0x400000 if negative else 0x7FC00001], dtype=torch.int32).view(torch.float32)


# ---- norms of projected values ----


@pytest.mark.parametrize("norm", [1, 2])
@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("block", [1, 3 * 24 * 7, 1 << 9, 1 << 18])
@pytest.mark.parametrize(("B", "T"), [(1, 1), (3, 1), (2, 40), (1, 0)])
def test_norms_are_those_of_each_head_alone(norm, wanted, block, B, T, monkeypatch):
    """However many heads and tokens a block takes; a weight may lie as a linear layer's does."""
    H, G, D, E = 4, 3, 8, 24
    monkeypatch.setattr(value_norms, "CPU_BLOCK", block)
    v, rows = torch.randn(B, H, T, D), torch.randn(E, H * G * D).T.unflatten(0, (H, G, D))
    mask = torch.rand(B, H, T) < 0.5
    want = torch.linalg.vector_norm(torch.einsum("bhtd,hgde->bhtge", v.double(), rows.double()), norm, dim=-1).mean(-1)
    got = value_norms.projected_norms(v, rows, norm, mask if wanted else None)
    assert got.dtype == torch.float32 and got.is_contiguous()
    if wanted:
        want, got = want * mask, got * mask
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_a_new_token_s_norms_take_one_product_for_all_heads_and_rows(monkeypatch):
    """On a device each product is a launch, of each layer and step."""
    products, bmm = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *parts: products.append(parts) or bmm(*parts))
    value_norms.projected_norms(torch.randn(16, 8, 1, 4), torch.randn(8, 2, 4, 32), 1)
    assert len(products) == 1


@pytest.mark.parametrize("T", [1, 1 << 15])
def test_norms_on_a_device_copy_no_weight_into_float32(T, monkeypatch):
    """A copy would be most of what a decode step reads of the layer's output projection."""
    products, bmm = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *parts, **how: products.append((*parts, how)) or bmm(*parts, **how))
    v, rows = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((1, 2, T, 8), (2, 3, 8, 4096)))
    assert value_norms.projected_norms(v, rows, 1).dtype == torch.float32
    assert products and all(left.dtype == right.dtype == torch.bfloat16 for left, right, _ in products)
    assert all(how == {"out_dtype": torch.float32} for *_, how in products)


# ---- NaN and the choice ----


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("signed", [False, True])
def test_a_score_that_is_nan_is_the_lowest_and_goes_oldest_first(signed, negative):
    low = -INF if signed else 0.0
    score = torch.tensor([[[low, 0.5, INF, low, 2.0, low]]])
    score[..., [0, 3]] = nan(negative)
    assert score.isnan().sum() == 2
    position = torch.tensor([[[7, 3, 1, 5, 9, 6]]])
    ranked = score_keys(score, position, signed)
    # tokens 5 (NaN), 6 (the lowest score there is), 7 (NaN), then by score
    assert position[0, 0, ranked[0, 0].argsort()].tolist() == [5, 6, 7, 3, 9, 1]
    assert (ranked >= 0).all()
    assert find_victims(ranked, None, 1).item() == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_nan_in_other_dtypes(dtype):
    score = torch.tensor([0.5, NAN, INF], dtype=dtype)
    assert score_keys(score, torch.arange(3), signed=True).argsort().tolist() == [1, 0, 2]


def _context(score, *, protected=0, keep=None, state=None, norms=None, group=1):
    B, H, S = score.shape
    limits = Limits.of([(0, 0, 0, protected, 0, 0)] * B, score.device)
    return EvictionContext(
        layer=0, seed=0, positions_BHT=torch.arange(S).expand(B, H, S).contiguous(), newest_B11=torch.full((B, 1, 1), S - 1),
        recent_B11=torch.full((B, 1, 1), S - 1), state={"sum": score, "observed": score, **(state or {})}, limits=limits,
        group=group, sliding=None, empty=False, keep_BH1=keep, norms=norms,
    )  # fmt: skip


def test_a_head_of_nan_is_left_out_of_the_layer_s_mean():
    tova = kvpatch.get_policy("tova")
    score = torch.rand(1, 3, 9)
    broken = score.clone()
    broken[:, 1] = NAN
    without = score.clone()
    without[:, 1] = 0.0
    assert torch.equal(tova.eviction_keys(_context(broken), None), tova.eviction_keys(_context(without), None))


def test_one_nan_does_not_make_nan_of_all_shares():
    keep = torch.tensor([[[4]]])
    score = torch.tensor([[[0.9, 0.8, NAN, 0.4, 0.3, 0.2, 0.1]]])
    norms = torch.tensor([[[1.0, 1.0, 9.0, 1.0, 9.0, 1.0, 8.0]]])
    clean = score.nan_to_num(0.0)

    def kept(value):
        context = _context(value, keep=keep, norms=lambda known, out: norms)
        ranked = TwoStage().eviction_keys(context, value, score_keys(value, context.positions_BHT, signed=False), None, None)
        return sorted(ranked[0, 0].topk(4).indices.tolist())

    assert kept(score) == kept(clean) == [0, 1, 4, 6]


def test_a_variance_of_nan_protects_nothing():
    rows = torch.rand(40, 6)
    total, squares = rows.sum(0)[None, None], rows.square().sum(0)[None, None]
    total[..., 2] = squares[..., 2] = NAN
    mask = DeviationScope(recent=0).mask(_context(total, protected=3, state={"squares": squares}))
    assert mask.sum() == 3
    assert not mask[0, 0, 2]


def _broken_head(model, value=NAN):
    """Layer 1's KV head 0 makes no numbers."""
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, :] = value
    return model


@pytest.mark.parametrize("policy", SCORED)
def test_a_head_of_nan_is_a_window_and_other_heads_are_untouched(policy):
    """NaN in one weight of layer 1: layer 0 keeps what it kept, bit for bit, and so does layer 1's other head."""
    ids, fed, options = prompt(2, 24), prompt(2, 6, seed=2), {"recent": 2} if policy in ("h2o", "roco") else {}
    held, state = [], []
    for model in (make("llama_gqa"), _broken_head(make("llama_gqa"))):
        with kvpatch.patched(model, policy, 9, **options):
            _, cache = force(model, ids, fed)
        held.append([cache.positions(layer) for layer in range(2)])
        state.append([layer.state for layer in cache.layers])
    assert torch.equal(held[0][0], held[1][0])
    for name, tensor in state[0][0].items():
        assert torch.equal(tensor, state[1][0][name]), name
    for b in range(2):
        mine = [sorted(p for p in held[1][1][b, h].tolist() if p >= 0) for h in range(2)]
        theirs = [sorted(p for p in held[0][1][b, h].tolist() if p >= 0) for h in range(2)]
        assert [len(head) for head in mine] == [9, 9]
        if policy != "tova":  # whose heads keep one set
            assert mine[1] == theirs[1]
        if policy in ("key_attention", "h2o", "roco", "key_norm"):
            assert mine[0] == list(range(21, 30))


@pytest.mark.parametrize("policy", EVICTING)
def test_nan_in_one_row_of_a_batch_leaves_the_others_bit_for_bit(policy):
    """The embedding of one token is NaN; rows that do not read it give and keep what they did."""
    ids, fed = prompt(3, 26), prompt(3, 5, seed=2)
    ids, fed = ids.masked_fill(ids == 96, 1), fed.masked_fill(fed == 96, 1)
    ids[1, 10] = 96
    mask = left_pad(ids, [26, 26, 19])
    results = []
    for value in (0.25, NAN):
        model = make("llama_gqa")
        with torch.no_grad():
            model.model.embed_tokens.weight[96] = value
        with kvpatch.patched(model, policy, 0.4, **SMALL.get(policy, {})):
            logits, cache = force(model, ids, fed, mask)
        results.append((logits, [cache.positions(layer) for layer in range(2)], cache))
    (good, held, _), (bad, kept, cache) = results
    assert bad[1].isnan().all()
    for row in (0, 2):
        if "ada" not in policy:
            assert torch.equal(good[row], bad[row])
        # heads of other lengths are padded otherwise, and sums rounded otherwise
        torch.testing.assert_close(good[row], bad[row], atol=1e-5, rtol=0)
        for mine, theirs in zip(kept, held, strict=True):
            assert sorted_positions([mine[row].tolist()]) == sorted_positions([theirs[row].tolist()])
    if policy not in ONCE:
        assert (cache.held(0)[1] == 10).all()


def test_nan_of_one_layer_does_not_reach_a_score_that_layers_share():
    ids, fed, held = prompt(1, 24), prompt(1, 6, seed=2), []
    for model in (make("llama_gqa"), _broken_head(make("llama_gqa"))):
        with kvpatch.patched(model, "keyformer", 9, shared=True):
            _, cache = force(model, ids, fed)
        held.append(cache)
    assert held[1].shared_score.isfinite().all()
    assert torch.equal(held[0].shared_score[:, 1].isfinite(), held[1].shared_score[:, 1].isfinite())


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize(
    ("policy", "negative"),
    slow_but([("roco", False)], [("h2o", True), ("scissorhands", True), ("roco", False), ("keyformer", True), ("tova", False)]),
)
def test_the_kernels_choose_the_same_victims(policy, negative):
    """Triton's kernels (in their interpreter) and torch, with a head of NaN."""
    pytest.importorskip("triton")
    ids, fed, held = prompt(1, 12), prompt(1, 3, seed=2), []
    options = {"heads": "each"} if policy == "tova" else {}
    for backend in ("torch", "triton"):
        model = _broken_head(make("llama_gqa"), nan(negative).item())
        with kvpatch.patched(model, policy, 8, backend=backend, **options):
            _, cache = force(model, ids, fed)
        held.append(sorted_positions([cache.positions(layer)[0].tolist() for layer in range(2)]))
    assert held[0] == held[1]


# ---- strict ----


@pytest.mark.parametrize("hop", ["queries", "keys", "values"])
def test_strict_names_the_layer_the_tensor_and_the_position(hop):
    """A token whose projection is infinite, in the prompt and in a decode step; the layer's cache is as before."""
    model = make("llama_gqa")
    name = {"queries": "q_proj", "keys": "k_proj", "values": "v_proj"}[hop]
    with torch.no_grad():
        model.model.embed_tokens.weight[96] = 3e38
        model.model.layers[0].input_layernorm.weight.fill_(1.0)
    ids, fed = prompt(2, 12).clamp(max=95), prompt(2, 1, seed=2).clamp(max=95)
    where = rf"{hop} of layer 1 \(layers\.1\.self_attn\) are NaN or infinite at row 1 position {{}}"
    with kvpatch.patched(model, "h2o", 6, strict=True), torch.no_grad():
        cache = model(ids).past_key_values
        used = cache.layers[1].keys.clone(), cache.layers[1].positions.clone()
        handle = getattr(model.model.layers[1].self_attn, name).register_forward_hook(_poison(1, 0))
        with pytest.raises(kvpatch.KVPatchError, match=where.format(12) + r", head"):
            model(fed, past_key_values=cache)
        assert torch.equal(used[0], cache.layers[1].keys)
        assert torch.equal(used[1], cache.layers[1].positions)
        handle.remove()
        handle = getattr(model.model.layers[1].self_attn, name).register_forward_hook(_poison(1, 4))
        with pytest.raises(kvpatch.KVPatchError, match=where.format(4) + r".*strict=True|strict=True.*" + where.format(4)):
            model(ids)
        handle.remove()
        getattr(model.model.layers[1].self_attn, name).register_forward_hook(_poison(1, slice(3, 9)))
        with pytest.raises(kvpatch.KVPatchError, match=where.format(3) + r", .*position 6 and 2 more, head"):
            model(ids)


def _poison(row, column):
    def hook(module, args, out):
        out = out.clone()
        out[row, column, 1] = INF
        return out

    return hook


def test_strict_names_probabilities_where_finite_queries_and_keys_overflow():
    model = make("llama_gqa")
    with torch.no_grad():
        for projection in ("q_proj", "k_proj"):
            getattr(model.model.layers[1].self_attn, projection).weight.mul_(1e20)
    with (
        kvpatch.patched(model, "h2o", 6, strict=True),
        torch.no_grad(),
        pytest.raises(kvpatch.KVPatchError, match=r"probabilities \(attention's output\) of layer 1"),
    ):
        model(prompt(1, 12))


def test_strict_names_scores():
    model, ids = make("llama_gqa"), prompt(1, 12)
    with kvpatch.patched(model, "h2o", 6, strict=True), torch.no_grad():
        cache = model(ids).past_key_values
        cache.layers[0].state["sum"][0, 1, 0] = INF
        cache.layers[0].positions[0, 1, 0] = 3
        cache.layers[0].mode.free_BH[0, 1] = 5
        with pytest.raises(kvpatch.KVPatchError, match=r"scores \('sum'\) of layer 0 .*row 0 position 3, head 1"):
            model(ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize("policy", ["h2o", "adakv", "keyformer", "critical_snapkv"])
def test_strict_changes_nothing_else_and_ignores_padding(policy):
    """Sound numbers pass; what a padded token asks for is nobody's concern."""
    model, ids, fed = make("llama_gqa"), prompt(2, 24), prompt(2, 5, seed=2)
    mask, found = left_pad(ids, [24, 15]), []
    for strict in (False, True):
        with kvpatch.patched(model, policy, 0.5, strict=strict):
            if strict:
                hook = model.model.layers[1].self_attn.q_proj.register_forward_hook(_padded(mask))
            logits, cache = force(model, ids, fed, mask)
            found.append((logits, [cache.positions(layer) for layer in range(2)]))
    hook.remove()
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-5, rtol=0)
    for mine, theirs in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(mine.sort().values, theirs.sort().values)


def _padded(mask):
    def hook(module, args, out):
        return out.masked_fill(mask[..., None] == 0, INF) if out.shape[1] > 1 else out

    return hook


def test_strict_is_a_flag():
    with pytest.raises(kvpatch.KVPatchError, match="strict='yes' must be True or False"):
        kvpatch.patch(make("llama"), "h2o", strict="yes")


# ---- rows without keys, -inf ----


def test_a_row_without_keys_gives_no_statistic():
    """Rows of padding alone, and a window that has moved past everything, add nothing, and no NaN."""
    B, H, G, Q, T, D = 2, 1, 2, 6, 6, 4
    q, k = torch.randn(B, H, G, Q, D), torch.randn(B, H, T, D)
    positions = torch.arange(T).repeat(B, H, 1)
    positions[1] = -1
    rows = positions[:, 0].clone()
    keys = Keys(k, k, positions, may_have_empty=True, columns_before=0, ordered=True)
    names, seen = ("sum", "squares", "count", "gumbel"), {}

    def observe(block_rows):
        for tau in (1.0, 1.7):
            noise = torch.ones(block_rows.p_NGRM.shape[0], block_rows.stop_column - block_rows.first_column, G)
            block = Block(block_rows.p_NGRM, block_rows.keys_NR, noise, lambda: None, tau, 0, 0)
            for name in names:
                increment = STATISTICS[name](block, NoisySums())
                seen.setdefault((name, tau), torch.zeros(B * H, T))[block_rows.first_head : block_rows.stop_head] += increment

    torch_backend.observe(q, keys, rows, Geometry(0.5, None, 3), None, observe, count=True)
    for key, total in seen.items():
        assert total.isfinite().all(), key
        assert (total[1] == 0).all(), key
        assert (total[0] > 0).any(), key
    tail = torch_backend.window_sums(q[:, :, :, -2:], keys, rows[:, -2:], Geometry(0.5, None, 3))
    assert tail.isfinite().all()
    assert (tail[1] == 0).all()


def test_a_step_whose_window_has_left_everything_but_itself():
    q, k = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 5, 4)
    keys = Keys(k, k, torch.tensor([[[0, 1, 2, 3, 90]]]), may_have_empty=False, columns_before=0, ordered=False)
    out, p = torch_backend.step(q, keys, torch.tensor([[[90]]]), Geometry(0.5, None, 4), True)
    assert torch.equal(p[0, 0], torch.tensor([[0.0, 0, 0, 0, 1]] * 2))
    torch.testing.assert_close(out[0, 0], k[0, 0, 4].expand(2, -1))


@pytest.mark.parametrize("policy", SCORED)
def test_logits_of_minus_infinity(policy):
    """ALiBi so steep that far keys get exactly nothing: scores are finite and budgets are kept."""
    model, ids, fed = make("mpt"), prompt(2, 24), prompt(2, 8, seed=2)
    with kvpatch.patched(model, policy, 0.4):
        for module in model.modules():
            if hasattr(module, "layer_idx") and "_kvpatch" in vars(module):
                module.softmax_scale = 1e4
        logits, cache = force(model, ids, fed, left_pad(ids, [24, 13]))
    assert logits.isfinite().all()
    for layer in range(2):
        assert cache.held(layer).tolist() == [[9] * 4, [5] * 4]
        for name, tensor in cache.layers[layer].state.items():
            assert name == "protect" or tensor[cache.layers[layer].positions >= 0].isfinite().all(), name


# ---- float16 ----


def test_sums_of_a_float16_model_are_float32():
    """Sums and sums of squares go on beyond float16's 65504."""
    model, ids = make("llama_gqa", dtype=torch.float16), prompt(1, 24)
    for policy in ("roco", "keyformer", "scissorhands", "key_norm"):
        with kvpatch.patched(model, policy, 10), torch.no_grad():
            cache = model(ids).past_key_values
            for layer in cache.layers:
                for name, tensor in layer.state.items():
                    assert tensor.dtype == torch.float32, name
                    if name in ("sum", "squares", "gumbel", "count"):
                        tensor.fill_(70000.0)
            for t in range(4):
                model(ids[:, t : t + 1], past_key_values=cache)
        for layer in cache.layers:
            old = layer.positions < 24
            for name in layer.statistics:
                found = layer.state[name][old & (layer.positions >= 0)]
                assert found.isfinite().all()
                assert (found >= 70000.0).all()
                assert (found > 70000.0).any()


@pytest.mark.parametrize("policy", ["h2o", "tova", "adakv", "roco"])
def test_logits_above_float16(policy):
    """Products that float16 cannot hold: output as the unpatched model's, and scores that are numbers."""
    ids, fed = prompt(1, 24), prompt(1, 6, seed=2)
    model = make("llama_gqa", dtype=torch.float16)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(200.0)
            layer.self_attn.k_proj.weight.mul_(200.0)
    plain, past = force(model, ids, fed)
    assert past.layers[1].keys.float().norm(dim=-1).max() ** 2 / 8**0.5 > 65504  # queries are as large
    with kvpatch.patched(model, policy, 1.0):
        whole, _ = force(model, ids, fed)
    torch.testing.assert_close(whole, plain, atol=2e-2, rtol=2e-2)
    with kvpatch.patched(model, policy, 10, strict=True, **SMALL.get(policy, {})):
        logits, cache = force(model, ids, fed)
    assert logits.isfinite().all()
    for layer in cache.layers:
        for name, tensor in layer.state.items():
            assert tensor[layer.positions >= 0].isfinite().all(), name


def test_a_step_saturates_where_float16_ends():
    """Two keys whose logits exceed float16 share a query; in bfloat16 and float32 nothing is cut off."""
    q = torch.full((1, 1, 1, 4), 200.0, dtype=torch.float16)
    k = torch.tensor([[400.0] * 4, [400.0] * 4, [1.0] * 4], dtype=torch.float16)[None, None]
    for slopes in (None, torch.zeros(1, 1)):
        keys = Keys(k, k, torch.arange(3)[None, None], may_have_empty=False, columns_before=0, ordered=True)
        out, p = torch_backend.step(q, keys, torch.tensor([[[2]]]), Geometry(0.5, slopes, None), True)
        assert p[0, 0, 0].tolist() == [0.5, 0.5, 0.0]
        assert out[0, 0, 0].tolist() == [400.0] * 4
    k32 = torch.tensor([[400.0] * 4, [401.0] * 4, [1.0] * 4])[None, None]
    keys = Keys(k32, k32, torch.arange(3)[None, None], may_have_empty=False, columns_before=0, ordered=True)
    _, p = torch_backend.step(q.float(), keys, torch.tensor([[[2]]]), Geometry(0.5, None, None), True)
    assert p[0, 0, 0].tolist() == [0.0, 1.0, 0.0]


# ---- one token ----


@pytest.mark.parametrize("name", FIVE)
@pytest.mark.parametrize("policy", [p for p in SCORED if p != "key_diff"])  # two tokens are equally unlike their mean
def test_budgets_of_one(name, policy):
    certain(name, policy, 1, n=9, steps=5, pads=(0, 4))


@pytest.mark.parametrize("policy", [p for p in EVICTING if p != "key_diff"])
def test_prompts_of_one_token(policy):
    certain("llama_gqa", policy, 1, n=1, steps=4 if policy not in ONCE else 2, pads=(0,), dtype=torch.float64)
    if policy not in ONCE:
        certain("mistral_sliding", policy, 3, n=1, steps=6, pads=(0,))


@pytest.mark.parametrize("name", FIVE)
def test_a_budget_of_one_after_the_prompt_alone(name):
    """What decides by the prompt's last rows keeps one token of each head, whatever the window asks for."""
    for policy in WINDOWED:
        model, ids = make(name), prompt(1, 12)
        with kvpatch.patched(model, policy, 1, window=4, kernel=3):
            _, cache = force(model, ids, prompt(1, 1, seed=2)[:, :0])
        assert sum(int(cache.held(layer).sum()) for layer in range(2)) == 2 * cache.held(0).shape[1], policy


# ---- far positions ----


def _far(cache, by):
    """The text began `by` tokens earlier, and all of them were evicted."""
    cache.seen_B += by
    for layer in cache.layers:
        layer.columns_read += by
        layer.positions[layer.positions >= 0] += by
        layer.precomputed_state = None
        for name in ("first", "prompt"):
            getattr(layer.limits, name).add_(0)
    cache.counters.tensors_or_none.columns.add_(by)


@pytest.mark.parametrize("policy", ["h2o", "window", "keyformer", "streaming_llm"])
def test_a_hundred_thousand_positions_in_bfloat16(policy):
    """Positions stay exact (bfloat16 and float16 cannot hold 100,003), and rotated keys are as transformers rotates them."""
    model, far = make("llama_gqa", dtype=torch.bfloat16), 100_000
    exponent = torch.arange(0, 8, 2, dtype=torch.float64) / 8
    model.model.rotary_emb.inv_freq = (1 / 10000.0**exponent).float()  # as from_pretrained has it; .to() rounds it too
    ids, fed = prompt(1, 16), prompt(1, 12, seed=2)
    with kvpatch.patched(model, policy, 8), torch.no_grad():
        cache = model(ids).past_key_values
        _far(cache, far)
        for t in range(12):
            model(fed[:, t : t + 1], past_key_values=cache)
            newest = far + 16 + t
            for layer in range(2):
                for head in cache.positions(layer)[0].tolist():
                    held = sorted(p for p in head if p >= 0)
                    assert len(held) == len(set(held)) == 8
                    assert all(far <= p <= newest for p in held)
                    if policy == "window":
                        assert held == list(range(newest - 7, newest + 1))
    assert cache.get_seq_length() == far + 28
    assert cache.seen_B.tolist() == [far + 28]
    # keys of layer 0 against float64: the model's own rotation of the embedded token at its exact position
    layer, attention = cache.layers[0], model.model.layers[0].self_attn
    with torch.no_grad():
        hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(fed))
        k = attention.k_proj(hidden).view(1, 12, 2, 8).transpose(1, 2).double()
    angle = torch.cat([torch.arange(far + 16, far + 28).double()[:, None] / 10000.0**exponent] * 2, -1)
    turned = torch.cat([-k[..., 4:], k[..., :4]], -1)
    want = k * angle.cos() + turned * angle.sin()
    compared = 0
    for h in range(2):
        for slot, p in enumerate(layer.positions[0, h].tolist()):
            if p >= far + 16:
                error = (layer.keys[0, h, slot].double() - want[0, h, p - far - 16]).abs().max()
                # transformers' table is float32 (an angle of 100,000 is good to 0.004), then rounded to bfloat16
                assert error < 0.02 * want[0, h, p - far - 16].norm() + 1e-6, (p, float(error))
                compared += 1
    assert compared >= 4


@pytest.mark.parametrize("policy", ["window", "dilated_window", "random"])
def test_positions_beyond_what_float32_holds(policy):
    """Above 2**24 neighbours have the same float32 score; the position decides."""
    position = torch.tensor([[[2**24 + 2, 2**24 + 1, 2**24, 2**24 + 3]]])
    context = _context(torch.zeros(1, 1, 4))
    context.positions_BHT, context.newest_B11 = position, torch.tensor([[[2**24 + 3]]])
    ranked = kvpatch.get_policy(policy).eviction_keys(context, None)
    assert ranked.unique().numel() == 4
    if policy == "window":
        assert ranked[0, 0].argsort().tolist() == [2, 1, 0, 3]


# ---- a million rows ----


def test_deviations_over_a_million_rows():
    """RoCo's sums in float32, a row at a time as decode steps add them, against float64: never negative, and close."""
    torch.manual_seed(0)
    T, rows = 12, 1_000_000
    scale = torch.rand(T) * 0.02
    total, squares = torch.zeros(1, 1, T), torch.zeros(1, 1, T)
    exact, exact_squares = torch.zeros(T, dtype=torch.float64), torch.zeros(T, dtype=torch.float64)
    for _ in range(rows // 50_000):
        p = (scale * torch.empty(50_000, T).exponential_()).clamp_(max=1.0)
        p[:, 0], p[:, 1], p[:, 2] = 2.0**-7, 0.003, 0.0
        # sequential float32 sums, one rounding per row, as `total.add_(row)` makes them
        total[0, 0] = torch.cat([total[0], p]).cumsum(0, dtype=torch.float32)[-1]
        squares[0, 0] = torch.cat([squares[0], p.square()]).cumsum(0, dtype=torch.float32)[-1]
        exact += p.double().sum(0)
        exact_squares += p.double().square().sum(0)
    context = _context(total, protected=3, state={"squares": squares})
    context.newest_B11 = torch.tensor([[[rows - 1 + T]]])
    context.positions_BHT = torch.full((1, 1, T), T)
    variance = (squares / context.rows_seen).sub_(context.mean * context.mean).clamp_min_(0)
    assert (variance >= 0).all()
    deviation = variance[0, 0].double().sqrt()
    mean = exact / rows
    want = (exact_squares / rows - mean.square()).clamp_min(0).sqrt()
    assert deviation[0] == deviation[2] == 0.0  # constant, of numbers that float32 adds exactly
    assert deviation[1] < 0.1 * mean[1]  # constant, but rounded a million times
    torch.testing.assert_close(deviation[3:], want[3:], rtol=5e-3, atol=0)
    context.positions_BHT = torch.arange(T)[None, None]
    context._rows_seen = torch.full((1, 1, T), float(rows))
    mask = DeviationScope(recent=0).mask(context)[0, 0]
    assert set(mask.nonzero().flatten().tolist()) == set(want.topk(3).indices.tolist())


@pytest.mark.parametrize("rows", [1, 2, 7, 4096])
def test_a_constant_column_has_no_deviation(rows):
    """Rounding never makes it negative: clamped, it is not NaN under a root and ranks below every column that varies."""
    values = torch.rand(64, generator=torch.Generator().manual_seed(rows))
    total, squares = (values * rows)[None, None], (values.square() * rows)[None, None]
    context = _context(total, protected=1, state={"squares": squares})
    context._rows_seen = torch.full((1, 1, 64), float(rows))
    variance = (squares / rows).sub_(context.mean * context.mean).clamp_min_(0)
    assert (variance >= 0).all()
    assert (variance <= 1e-6).all()
    squares[0, 0, 5] += 1e-3 * rows
    assert DeviationScope(recent=0).mask(context)[0, 0].nonzero().tolist() == [[5]]
