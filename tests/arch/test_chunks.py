"""Layers that attend in chunks (Llama 4): what a query sees begins anew, in every way in which a text can be read."""

import pytest
import torch
import torch._dynamo
from transformers import Llama4ForCausalLM

import kvpatch
from kvpatch.backends import torch_backend
from kvpatch.backends.flash import flash_backend
from kvpatch.backends.protocol import Case, Geometry, Keys
from kvpatch.backends.triton import triton_backend
from kvpatch.policies.windows import Chunk, find_end, find_oldest
from tests.helpers.comparing import agrees
from tests.helpers.joined import Loop, scenario
from tests.helpers.marks import batches
from tests.helpers.running import logits_of
from tests.helpers.tiny import force, left_pad, prompt, sound
from tests.helpers.tiny_families import FAMILIES, make
from tests.oracle import reference_families

TEXT = torch.arange(40)


@pytest.mark.parametrize("window", [1, 5, 40, Chunk(1), Chunk(5), Chunk(40)], ids=lambda w: f"{type(w).__name__}{w}")
def test_a_window_by_its_mask(window):
    """The first key that each query sees and the first query that does not see each key, counted in a mask."""
    q, k = TEXT[:, None], TEXT[None]
    seen = (k <= q) & ((q // int(window) == k // int(window)) if isinstance(window, Chunk) else (q - k < window))
    assert torch.equal(find_oldest(window, TEXT).clamp(min=0), seen.int().argmax(1))
    assert torch.equal(find_end(window, TEXT).clamp(max=40), (seen.sum(0) + TEXT))
    assert [find_oldest(window, t) for t in range(40)] == find_oldest(window, TEXT).tolist()


def test_only_a_text_of_several_chunks_is_for_torch():
    """A text within one chunk is causal to a kernel; one that goes on behind evicted tokens is not, however few are held."""
    for task in ("prompt", "statistics", "decode", "ragged"):
        case = Case("cuda", torch.bfloat16, 64, special=("chunk",), window=True)
        assert "attention in chunks" in triton_backend.reason(task, case)
        assert "attention in chunks" in flash_backend.reason(task, case)
        assert torch_backend.reason(task, case) is None
    model = make("llama4_chunks")  # chunks of 7
    seen = []
    with kvpatch.patched(model, "h2o", 4) as patch, torch.no_grad():
        cache = patch.new_cache()
        for n in (7, 2, 8):
            model(prompt(1, n), past_key_values=cache)
            seen += [case.special for _, case in cache.backend_choice.choices if _ == "prompt"][-1:]
    assert seen == [(), ("chunk",), ("chunk",)]


@pytest.mark.parametrize("name", ["llama4", "llama4_chunks"])
def test_rows_at_different_places_of_their_chunks(name):
    model = make(name, dtype=torch.float64)
    with torch.no_grad(), kvpatch.patched(model, "h2o", 5) as patch:
        scenario(Loop(model, patch))


@pytest.mark.parametrize("name", ["llama4", "llama4_tuned"])
def test_a_cache_goes_on_from_a_file_and_back_across_a_chunk(name, tmp_path):
    model, ids, fed = make(name), prompt(2, 12), prompt(2, 12, seed=2)
    with torch.no_grad(), kvpatch.patched(model, "h2o", 6) as patch:
        want, whole = force(model, ids, fed)
        _, cache = force(model, ids, fed[:, :1])
        patch.save_cache(cache, tmp_path / "cache.safetensors")
        loaded = patch.load_cache(tmp_path / "cache.safetensors")
        assert [layer.sliding for layer in loaded.layers] == [layer.sliding for layer in cache.layers]
        loaded.activate_past_recording()
        for token in prompt(2, 4, seed=3).split(1, 1):  # 17 tokens: two chunks of 7 and 3 more
            model(token, past_key_values=loaded)
        loaded.crop(13)
        got = [model(fed[:, t : t + 1], past_key_values=loaded).logits[:, -1] for t in range(1, 12)]
        sound(loaded)
    torch.testing.assert_close(torch.stack(got, 1), want[:, 2:], atol=2e-5, rtol=0)
    for layer in range(len(whole.layers)):
        assert torch.equal(loaded.positions(layer).sort(-1).values, whole.positions(layer).sort(-1).values)


@pytest.mark.parametrize("name", ["llama4", "llama4_chunks", "llama4_tuned"])
def test_compiled_steps_across_a_chunk(name):
    torch._dynamo.reset()
    model, ids, fed = make(name), prompt(1, 12), prompt(1, 6, seed=2)
    with torch.no_grad(), kvpatch.patched(model, "h2o", 6) as patch:
        cache = patch.new_cache(room=8)
        model(ids, past_key_values=cache)
        other = cache.clone()
        step = torch.compile(model, backend="eager", fullgraph=True)
        for token in fed.split(1, 1):
            want = model(token, past_key_values=other).logits
            torch.testing.assert_close(step(token, past_key_values=cache).logits, want, atol=2e-5, rtol=0)


@batches
def test_continuous_batching_is_refused():
    model = make("llama4")
    words = "continuous batching knows no layers that attend in chunks"
    with kvpatch.patched(model, "h2o", 6), pytest.raises(kvpatch.KVPatchError, match=words):
        model.generate_batch([[5, 6, 7]])


@pytest.mark.parametrize("name", ["llama4", "llama4_chunks"])
def test_a_replay_sees_the_rollouts_chunks(name):
    model, ids, fed = make(name), prompt(2, 18), prompt(2, 6, seed=2)
    mask = left_pad(ids, [18, 11])
    with kvpatch.patched(model, "h2o", 5, record=True) as patch:
        want, cache = force(model, ids, fed, mask)
        record = patch.record(cache)
    whole = torch.cat([mask, torch.ones_like(fed)], 1)
    with torch.no_grad(), kvpatch.replay(model, record):
        got = logits_of(model, torch.cat([ids, fed], 1), whole)
    torch.testing.assert_close(got[:, 17:], want, atol=3e-5, rtol=0)


def test_padding_between_tokens_counts_as_in_the_unpatched_model():
    """At k=1.0 alone; chunks begin at a row's first token."""
    model, ids, fed = make("llama4"), prompt(2, 20), prompt(2, 8, seed=2)
    mask = left_pad(ids, [20, 13])
    mask[1, 10:13] = 0
    want, _ = force(model, ids, fed, mask)
    with kvpatch.patched(model, "h2o", 1.0):
        got, _ = force(model, ids, fed, mask)
    torch.testing.assert_close(got, want, atol=3e-5, rtol=0)


def test_attention_to_chunks_behind_evicted_tokens():
    """Keys at any places, of which a prompt's rows and a step see those of their own chunk."""
    generator = torch.Generator().manual_seed(0)
    positions, rows = torch.tensor([0, 3, 8, 9, 14, 15, 16]), torch.tensor([[14, 15, 16]])
    q, k, v = (torch.randn(1, 1, n, 4, generator=generator, dtype=torch.float64) for n in (3, 7, 7))
    keys = Keys(k, v, positions.expand(1, 1, -1), may_have_empty=False, columns_before=4, ordered=True)
    geometry = Geometry(0.5, None, Chunk(5))
    seen = (positions <= rows[0, :, None]) & (positions // 5 == rows[0, :, None] // 5)
    want = torch.softmax((q @ k.mT * 0.5).masked_fill(~seen, -torch.inf), -1) @ v
    out, _ = torch_backend.attend(q[:, :, None], keys, rows, geometry)
    torch.testing.assert_close(out[:, :, 0], want)
    last, p = torch_backend.step(q[:, :, None, -1], keys, torch.tensor([[[16]]]), geometry, True)
    torch.testing.assert_close(last[:, :, 0], want[:, :, -1])
    assert (p[0, 0, 0] > 0).tolist() == (positions >= 15).tolist()


def test_layers_that_count_columns_and_evict_together(monkeypatch):
    """No layer attends in chunks, so that steps run on stacked layers, each of which says what it has seen."""
    kind, given = FAMILIES["llama4_tuned"]
    monkeypatch.setitem(FAMILIES, "llama4_whole", (kind, {**given, "no_rope_layers": [0] * 4, "layer_types": None}))
    models = (make("llama4_whole", seed=weights, dtype=torch.float64) for weights in range(6))
    found = (agrees("", "h2o", 9, pads=(0, 0), weights=weights, model=model) for weights, model in enumerate(models))
    reference_families.learn(Llama4ForCausalLM)
    assert any(found), "every draw was too close to call"
