"""`bits=`: keys and values rounded to 8 or 4 bits. Attention and scores see what the oracle rounds, and bytes are exact."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvpatch
from kvpatch import KVPatchError
from kvpatch.backends import dispatch, entries
from kvpatch.backends.entry_sizes import count_centre_bytes, count_entry_bytes
from kvpatch.backends.protocol import Case
from kvpatch.cache.narrow import make_prompt_slots, open_slots
from tests.helpers.comparing import EVICTING, SMALL, certain
from tests.helpers.running import RAGGED, uneven
from tests.helpers.tiny import MODELS, force, left_pad, make, prompt

pytestmark = pytest.mark.usefixtures("no_gradients")
NARROW = pytest.mark.parametrize("bits", [8, 4])


# ---- the oracle ----


@NARROW
@pytest.mark.parametrize("policy", ["full", *EVICTING])
@pytest.mark.parametrize("name", MODELS)
def test_every_policy_on_every_architecture(name, policy, bits):
    certain(name, policy, 0.4, n=20, steps=6, bits=bits, **SMALL.get(policy, {}))


@NARROW
@pytest.mark.parametrize("policy", EVICTING)
def test_rows_of_one_length(policy, bits):
    """Stacked layers."""
    certain("llama_gqa", policy, 0.4, n=20, pads=(0, 0), steps=6, bits=bits, **SMALL.get(policy, {}))


OTHERWISE = [{"k": 8, "block": 6}, {"positions": "renumbered"}, {"schedule": "prompt"}, {"schedule": "decode", "k": 6}]


@NARROW
@pytest.mark.parametrize("options", OTHERWISE, ids=str)
@pytest.mark.parametrize("policy", ["h2o", "streaming_llm"])
def test_what_else_a_patch_is_told(policy, options, bits):
    """A block attends to what earlier blocks left, rounded."""
    for name in ("llama_gqa", "mpt"):
        certain(name, policy, **{"k": 0.4, "n": 20, "steps": 6, "bits": bits, **options})


@NARROW
def test_ragged_layers_of_long_prompts(bits):
    certain("llama_gqa", "adakv", 0.4, n=30, steps=6, bits=bits, window=5, kernel=3)
    model = make("llama_gqa")
    with kvpatch.patched(model, RAGGED["adakv"], 0.4, bits=bits):
        uneven(force(model, prompt(2, 40), prompt(2, 1))[1])


@NARROW
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype, bits):
    """As near to unrounded half precision as the bits allow."""
    model, ids, fed = make("llama_gqa", dtype=dtype), prompt(2, 30), prompt(2, 8, seed=2)
    mask = left_pad(ids, [30, 21])
    for policy in ("streaming_llm", RAGGED["adakv"]):
        with kvpatch.patched(model, policy, 0.4):
            full, _ = force(model, ids, fed, mask)
        with kvpatch.patched(model, policy, 0.4, bits=bits):
            got, cache = force(model, ids, fed, mask)
        assert cache.layers[0].keys.dtype == dtype and cache.layers[0].kv.keys.dtype == torch.uint8
        error = (got.float() - full.float()).abs().mean() / full.float().abs().mean()
        assert error < (0.4 if bits == 4 else 0.05), (policy, float(error))


# ---- the prompt itself ----


@NARROW
@pytest.mark.parametrize("name", MODELS)
def test_the_prompt_attends_in_full(name, bits):
    model, ids = make(name), prompt(2, 20)
    want = model(ids).logits
    with kvpatch.patched(model, "h2o", 1.0, bits=bits):
        torch.testing.assert_close(model(ids).logits, want, atol=2e-5, rtol=0)


@NARROW
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_later_prompt_leaves_earlier_entries_their_bytes(dtype, bits):
    """Rounded anew, they would drift from turn to turn."""
    model = make("llama_gqa", dtype=dtype)
    with kvpatch.patched(model, "full", 1.0, bits=bits):
        _, cache = force(model, prompt(2, 20), prompt(2, 4, seed=2))
        before = [(layer.kv.keys[:, :, :24].clone(), layer.kv.values[:, :, :24].clone()) for layer in cache.layers]
        force(model, prompt(2, 9, seed=3), prompt(2, 2, seed=4), cache=cache)
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.kv.keys[:, :, :24], keys) and torch.equal(layer.kv.values[:, :, :24], values)


@NARROW
def test_a_prompt_in_pieces_is_rounded_at_its_end(bits):
    model, ids = make("llama_gqa", dtype=torch.float64), prompt(1, 24)
    with kvpatch.patched(model, "h2o", 0.5, bits=bits):
        whole, pieces = (
            model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0, output_logits=True,
                           return_dict_in_generate=True, **more)
            for more in ({}, {"prefill_chunk_size": 7})
        )  # fmt: skip
    torch.testing.assert_close(torch.stack(whole.logits), torch.stack(pieces.logits), atol=1e-6, rtol=0)


@NARROW
def test_gradients_of_blocks_pass_through_the_rounding(bits):
    """Values with and without a graph agree, and every weight gets a gradient."""
    model, ids = make("llama_gqa", dtype=torch.float64), prompt(1, 20)
    with torch.enable_grad(), kvpatch.patched(model, "h2o", 8, block=6, bits=bits):
        with torch.no_grad():
            want = model(ids, use_cache=False).logits
        got = model(ids, use_cache=False).logits
        torch.testing.assert_close(got, want, atol=1e-9, rtol=0)
        got.square().mean().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


# ---- bytes ----


@NARROW
@pytest.mark.parametrize("policy", ["h2o", RAGGED["adakv"], "full"])
def test_bytes_are_those_of_the_slots(policy, bits):
    model = make("llama_gqa")
    D = model.config.hidden_size // model.config.num_attention_heads
    with kvpatch.patched(model, policy, 0.4, bits=bits) as patch:
        _, cache = force(model, prompt(2, 40), prompt(2, 3))
        report = patch.report()
        slots = sum(sum(layer.kv.capacities()) for layer in cache.layers)
        centres = 2 * 2 * 2 * D * 4  # of rows, layers and heads
        assert cache.nbytes == slots * count_entry_bytes(bits, D, D, 4) + centres == report.nbytes
        assert report.full_nbytes == 2 * 2 * 43 * 2 * 2 * D * 4 and report.bits == report.to_dict()["bits"] == bits
        assert f"{bits} bits" in str(report)


def test_a_budget_in_bytes_holds_more_tokens():
    model, held = make("llama_gqa"), {}
    D = model.config.hidden_size // model.config.num_attention_heads
    for bits in (16, 8, 4):
        with kvpatch.patched(model, "streaming_llm", "8KiB", bits=bits):
            _, cache = force(model, prompt(1, 90), prompt(1, 3))
        held[bits], centres = int(cache.held(0)[0, 0]), 2 * 2 * count_centre_bytes(bits, D, 4)
        assert held[bits] == (8192 - centres) // (2 * 2 * count_entry_bytes(bits, D, D, 4))
        taken = sum(int(cache.held(layer).sum()) for layer in range(2)) * count_entry_bytes(bits, D, D, 4)
        assert taken + sum(layer.kv.centre.numel() * 4 for layer in cache.layers if layer.kv.centre is not None) <= 8192
    assert held[4] > held[8] > 1.5 * held[16]


@pytest.mark.parametrize("bits", [16, 8])
def test_buffers_have_one_slot_more_than_a_budget_in_bytes(bits):
    """The budget bounds what is held between steps; the slot that the next token goes into comes on top, in every head."""
    model = make("llama_gqa")
    D = model.config.hidden_size // model.config.num_attention_heads
    with kvpatch.patched(model, "streaming_llm", "8KiB", bits=bits) as patch:
        _, cache = force(model, prompt(1, 90), prompt(1, 3))
        entry, centres = count_entry_bytes(bits, D, D, 4), 2 * 2 * count_centre_bytes(bits, D, 4)
        tokens = (8192 - centres) // (2 * 2 * entry)
        assert patch.report().nbytes == cache.nbytes == 2 * 2 * (tokens + 1) * entry + centres
        assert int(cache.held(0)[0, 0]) == tokens


class Largest(TorchDispatchMode):
    """The most numbers of a floating-point tensor made."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else [out]:
            if isinstance(one, torch.Tensor) and one.is_floating_point():
                self.most = max(self.most, one.numel())
        return out


@NARROW
@pytest.mark.parametrize("policy", ["h2o", "roco", RAGGED["adakv"], "full"])
def test_a_step_unpacks_a_few_columns_at_a_time(policy, bits, monkeypatch):
    """No tensor of a step is larger than a block; unpacked, one layer's keys are larger."""
    block = 1 << 11
    monkeypatch.setattr(entries, "CPU_BLOCK", block)
    model, ids = make("llama_gqa"), prompt(2, 120)
    with kvpatch.patched(model, policy, 0.9, bits=bits):
        past = model(ids).past_key_values
        with Largest() as seen:
            model(ids[:, :1], past_key_values=past)
    layer = past.layers[0]
    assert int(past.held(0).sum()) * layer.kv.sizes[0] > 1.5 * block
    weights = max(p.numel() for p in model.parameters())
    assert seen.most <= max(block, weights), (seen.most, weights)


# ---- what can be done with a cache ----


@NARROW
def test_caches_of_other_bits_are_refused(bits, tmp_path):
    model, other = make("llama_gqa"), 12 - bits
    with kvpatch.patched(model, "h2o", 0.4, bits=bits) as patch:
        _, cache = force(model, prompt(1, 20), prompt(1, 2))
        patch.save_cache(cache, tmp_path / "one")
    with kvpatch.patched(model, "h2o", 0.4, bits=other) as patch:
        with pytest.raises(KVPatchError, match=rf"bits is {bits} there and {other} here"):
            patch.load_cache(tmp_path / "one")
        with pytest.raises(KVPatchError, match=rf"bits is {bits} there and {other} here"):
            model(prompt(1, 1), past_key_values=cache)


@NARROW
def test_a_saved_cache_with_a_scale_that_is_no_number_is_refused(bits, tmp_path):
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 0.4, bits=bits) as patch:
        _, cache = force(model, prompt(1, 20), prompt(1, 2))
        cache.layers[1].kv.keys[..., :4] = 255  # a scale of NaN
        patch.save_cache(cache, tmp_path / "one")
        with pytest.raises(KVPatchError, match="layer 1: keys are not finite"):
            patch.load_cache(tmp_path / "one")


@NARROW
def test_a_dynamic_cache_is_taken_over(bits):
    model, ids, fed = make("llama_gqa", dtype=torch.float64), prompt(1, 20), prompt(1, 5, seed=2)
    with kvpatch.patched(model, "streaming_llm", 9, bits=bits):
        want, plain = force(model, ids, fed)
    past = model(ids[:, :13], use_cache=True).past_key_values
    with kvpatch.patched(model, "streaming_llm", 9, bits=bits) as patch:
        cache = patch.new_cache(past)
        got, _ = force(model, ids[:, 13:], fed, cache=cache)
    torch.testing.assert_close(got[:, 1:], want[:, 1:], atol=1e-6, rtol=0)


# ---- the door ----


def test_a_number_of_numpy_is_taken():
    with kvpatch.patched(make("llama_gqa"), "h2o", bits=np.int64(8)) as patch:
        assert patch.settings.bits == 8 and type(patch.settings.bits) is int


@NARROW
def test_flash_kernels_leave_rounded_slots_to_others(bits):
    """Triton's decode kernels read them; a prompt is read in full precision."""
    case = Case("cuda", torch.float16, 64, bits=bits)
    assert "not entries rounded to bits=" in dispatch.backend("flash").reason("ragged", case)
    assert "not entries rounded to bits=" in dispatch.backend("triton").reason("statistics", case)
    assert dispatch.backend("triton").reason("decode", case) is dispatch.backend("triton").reason("ragged", case) is None


@pytest.mark.parametrize("bits", [8, 4])
def test_norms_of_generated_tokens_are_of_the_keys_that_attention_reads(bits):
    model, ids = make("llama"), prompt(1, 30)
    with torch.no_grad(), kvpatch.patched(model, "key_norm", 16, bits=bits) as patch:
        _, cache = force(model, ids, prompt(1, 6, seed=2), cache=patch.new_cache())
    compared = 0
    for layer in cache.layers:
        new = (layer.positions[:, :, : layer.columns_used] >= 30).nonzero().unbind(1)
        read = layer.keys.double().norm(dim=-1)[new]
        torch.testing.assert_close(layer.state["key_norm"][new].double(), read, atol=1e-5, rtol=1e-5)
        compared += len(read)
    assert compared > 8, "few generated tokens were kept"


@pytest.mark.parametrize("latent", [False, True])
def test_rows_move_in_the_midst_of_a_prompt_with_all_that_is_theirs(latent):
    """Entries of earlier prompts, the centre of the keys, and what is rounded of them in the end."""
    k, v, more = torch.rand(3, 3, 2, 6, 8).unbind()
    first = make_prompt_slots(k, v, 8, latent)
    first.fix_centre(torch.arange(6).expand(3, 2, 6))
    slots = open_slots(first.close_columns(6))
    slots = slots.resized([12] * 6, None, 6)
    slots.append(6, more, more)
    rows = torch.tensor([2, 0])
    moved = slots.map_rows(lambda tensor: tensor[rows], 3, 2)
    pairs = [*zip(moved.stored, slots.stored, strict=True), *zip(moved.packed, slots.packed, strict=True)]
    pairs += [(moved.centre, slots.centre), *zip(moved.close_columns(12).stored, slots.close_columns(12).stored, strict=True)]
    assert len(pairs) == (4 if latent else 7)
    assert all(torch.equal(mine, own[rows]) for mine, own in pairs)
    assert (moved.values.data_ptr() == moved.keys.data_ptr()) == latent
