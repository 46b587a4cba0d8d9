"""Keys with a few large channels, as those of Qwen 2 have: rounded around the centre of each head's keys they cost no more."""

import pytest
import torch

import kvpatch
from kvpatch import EvictingCache, KVPatchError
from kvpatch.backends.entries import centre_codecs, codecs, find_midrange
from tests.helpers import tiny_families
from tests.helpers.running import RAGGED, go_on
from tests.helpers.tiny import force, left_pad, make, prompt

pytestmark = pytest.mark.usefixtures("no_gradients")
NARROW = pytest.mark.parametrize("bits", [8, 4])
LATENT = "deepseek_v3"
LARGE = 100.0
PROJECTIONS = {"llama_gqa": "k_proj", "mpt": "Wqkv", "gpt2": "c_attn", LATENT: "kv_a_proj_with_mqa"}


def with_large_channels(name, size=LARGE):
    """A model with `size` added to two channels of every key, which leaves its attention as it is: they do not rotate."""
    model = tiny_families.make(name) if name == LATENT else make(name)
    model = model.double()
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            module.inv_freq[-1] = 0.0

    def add(module, args, out):
        out = out.clone()
        if name == LATENT:  # the rotary channels are the last, and neighbours make a pair
            keys = out[..., -model.config.qk_rope_head_dim :].unflatten(-1, (-1, 2)).transpose(-1, -2)
        else:
            own = out if name == "llama_gqa" else out[..., 32:64]
            keys = own.unflatten(-1, (-1, 2, 4))  # of a head's 8 channels the two of each pair
        keys[..., 0, -1] += size
        keys[..., 1, -1] -= size
        return out

    for where, module in model.named_modules():
        if where.endswith(PROJECTIONS[name]):
            module.register_forward_hook(add)
    return model


def logits_of(model, bits, policy="window", k=1.0, **options):
    with kvpatch.patched(model, policy, k, bits=bits, **options):
        return force(model, prompt(2, 40), prompt(2, 8, seed=2), left_pad(prompt(2, 40), [40, 23]))[0]


@NARROW
@pytest.mark.parametrize("name", PROJECTIONS)
def test_large_channels_cost_nothing(name, bits):
    plain, large = with_large_channels(name, 0.0), with_large_channels(name)
    full = logits_of(plain, 16)
    torch.testing.assert_close(logits_of(large, 16), full, atol=1e-7, rtol=0)
    usual, found = ((logits_of(model, bits) - full).abs().mean() for model in (plain, large))
    assert found < 1.1 * usual, (float(found), float(usual))


@NARROW
@pytest.mark.parametrize("options", [{"policy": "key_diff", "k": 0.5}, {"policy": "h2o", "k": 12, "block": 8},
                                     {"policy": RAGGED["adakv"], "k": 0.5}, {"policy": "streaming_llm", "k": 0.5, "positions":
                                     "renumbered"}], ids=["keys", "blocks", "ragged", "renumbered"])  # fmt: skip
def test_nor_under_a_policy(options, bits):
    """The logits are as near to those of unrounded keys."""
    usual, found = (
        (logits_of(model, bits, **options) - logits_of(model, 16, **options)).abs().mean()
        for model in (with_large_channels("llama_gqa", 0.0), with_large_channels("llama_gqa"))
    )
    assert found < 1.5 * usual, (float(found), float(usual))


# ---- the centre itself ----


def test_the_centre_is_midway_and_of_real_keys_alone():
    k = torch.tensor([[1.0, -4.0], [9.0, 0.0], [3.0, 2.0], [50.0, 50.0]])[None, None]
    real = torch.tensor([True, True, True, False])[None, None]
    assert find_midrange(k, real).flatten().tolist() == [5.0, -1.0]
    assert find_midrange(k, torch.zeros_like(real)).flatten().tolist() == [0.0, 0.0]
    assert find_midrange(k.half() * 1200, real).isfinite().all()


@NARROW
def test_a_row_of_a_padded_batch_has_the_centre_that_it_has_alone(bits):
    """Also where its first blocks are padding: then the first one that is not."""
    model, ids = make("llama_gqa", dtype=torch.float64), prompt(2, 24)
    for length, options in ((14, {}), (8, {"block": 8})):
        with kvpatch.patched(model, "streaming_llm", 7, bits=bits, **options):
            _, both = force(model, ids, ids[:, :0], left_pad(ids, [24, length]))
            _, alone = force(model, ids[1:, 24 - length :], ids[1:, :0])
        for mine, own in zip(both.layers, alone.layers, strict=True):
            torch.testing.assert_close(mine.kv.centre[1:], own.kv.centre, atol=1e-12, rtol=0)
            assert torch.equal(mine.positions[1:].sort().values[..., -7:], own.positions.sort().values[..., -7:])


@NARROW
def test_a_later_prompt_leaves_the_centre(bits):
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 0.5, bits=bits):
        _, cache = force(model, prompt(2, 20), prompt(2, 4, seed=2))
        before = [layer.kv.centre.clone() for layer in cache.layers]
        force(model, prompt(2, 9, seed=3), prompt(2, 2, seed=4), cache=cache)
    assert all(torch.equal(layer.kv.centre, centre) for layer, centre in zip(cache.layers, before, strict=True))


@NARROW
@pytest.mark.parametrize("policy", ["h2o", "full", "adakv"])
def test_texts_keep_their_centres_when_they_are_joined(policy, bits):
    """Rows of different prompts, joined, turned and copied."""
    model, texts = make("llama_gqa", dtype=torch.float64), [(prompt(1, n, seed=n), prompt(1, 5, seed=n + 1)) for n in (40, 25)]
    with kvpatch.patched(model, RAGGED.get(policy, policy), 0.4, bits=bits):
        alone = [force(model, *text)[0][:, 3:] for text in texts]
        parts = [force(model, ids, fed[:, :2])[1] for ids, fed in texts]
        joined = EvictingCache.concatenate(parts)
        joined.reorder_cache(torch.tensor([1, 0]))
        joined.batch_repeat_interleave(2)
        fed = torch.cat([texts[row][1] for row in (1, 1, 0, 0)])
        logits, _ = go_on(model, fed[:, 2:], joined)
    torch.testing.assert_close(logits, torch.cat([alone[row] for row in (1, 1, 0, 0)]), atol=1e-9, rtol=0)


@NARROW
@pytest.mark.parametrize("policy", [name for name in RAGGED if "critical" not in name])
def test_heads_of_a_ragged_layer_have_their_own(policy, bits):
    """The products of their entries are those of the same entries in dense slots."""
    model = make("llama_gqa", dtype=torch.float64)
    with kvpatch.patched(model, RAGGED[policy], 0.4, bits=bits):
        _, cache = force(model, prompt(2, 60), prompt(2, 2))
    ragged = [layer.kv for layer in cache.layers if layer.kv.head_offsets is not None]
    assert ragged
    for kv in ragged:
        dense, offsets, width = kv.make_dense(2, 2), kv.head_offsets, kv.width
        (k, v), (own_k, own_v) = dense.numbers(width), kv.numbers(width)
        places = offsets.places()
        assert bool((torch.arange(width) < offsets.capacity_N[:, None])[places].all())
        assert torch.equal(own_k, k.flatten(0, 1)[places]) and torch.equal(own_v, v.flatten(0, 1)[places])
        q = torch.randn(4, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        x = (q @ k.flatten(0, 1).transpose(1, 2)).transpose(1, 2)[torch.arange(width) < offsets.capacity_N[:, None]]
        found = offsets.multiply_keys(q, kv.keys, kv.codecs[0]).transpose(1, 2)[
            torch.arange(width) < offsets.capacity_N[:, None]
        ]
        torch.testing.assert_close(found, x, atol=1e-9, rtol=0)


@NARROW
def test_a_file_without_a_sound_centre_is_refused(bits, tmp_path):
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 0.4, bits=bits) as patch:
        _, cache = force(model, prompt(1, 20), prompt(1, 2))
        centre = cache.layers[1].kv.centre
        centre[0, 0, 0, 3] = torch.nan
        patch.save_cache(cache, tmp_path / "bad")
        with pytest.raises(KVPatchError, match="layer 1: .*centre of its keys"):
            patch.load_cache(tmp_path / "bad")
        cache.layers[1].kv.codecs = centre_codecs(cache.layers[1].kv.codecs, None)
        patch.save_cache(cache, tmp_path / "none")
        with pytest.raises(KVPatchError, match=r"holds no 1\.centre_BH1D"):
            patch.load_cache(tmp_path / "none")


def test_full_precision_has_no_centre():
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 0.4):
        _, cache = force(model, prompt(1, 9), prompt(1, 1))
    assert all(layer.kv.centre is None for layer in cache.layers)
    assert centre_codecs(codecs(16, 8, 8, torch.float32), torch.zeros(1, 1, 1, 8)) == codecs(16, 8, 8, torch.float32)
