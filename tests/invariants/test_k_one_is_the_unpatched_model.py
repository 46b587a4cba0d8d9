"""Law 1: k=1.0 changes nothing, whatever the policy, architecture, batch, padding, decoding and dtype."""

import copy
import inspect

import pytest
import torch
from transformers import CompileConfig

import kvpatch
from kvpatch.cache import from_dynamic
from tests.helpers import tiny_families
from tests.helpers.tiny import FIVE, MODELS, MORE, force, left_pad, make, prompt

TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-9, torch.bfloat16: 0.15}
KINDS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 4, "do_sample": False},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "chunked": {"do_sample": False, "prefill_chunk_size": 7},
    "lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
}


def generate(model, ids, mask, **kwargs):
    torch.manual_seed(7)
    return model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=12,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=0,
        **kwargs,
    )


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left-padded"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*FIVE, *MORE])
def test_generate_is_unchanged(name, kind, padded):
    if kind == "lookup" and padded:
        pytest.skip("transformers looks prompts up for one row only")
    model = make(name)
    ids = prompt(1 if kind == "lookup" else 2, 30)
    mask = left_pad(ids, [30, 21]) if padded else torch.ones_like(ids)
    if kind == "chunked" and padded and name in ("mpt", "bloom"):
        pytest.skip("unpatched MPT shifts its ALiBi bias when a padded prompt comes in pieces, and BLOOM cannot read it")
    want = generate(model, ids, mask, **KINDS[kind])
    with kvpatch.patched(model, "keyformer", 1.0):
        got = generate(model, ids, mask, **KINDS[kind])
    assert torch.equal(want.sequences, got.sequences)
    for a, b in zip(want.logits, got.logits, strict=True):
        torch.testing.assert_close(a, b, atol=TOLERANCE[torch.float32], rtol=0)


@pytest.mark.parametrize("k", [1.0, 0.5, 4])
@pytest.mark.parametrize("by", ["argument", "config"])
@pytest.mark.parametrize("name", [*MODELS, *MORE])
def test_one_token_without_a_cache_is_unchanged(name, by, k):
    """MPT and Falcon make a mask of one entry for it, as kvpatch does for every pass."""
    model, ids = make(name), prompt(1, 1)
    model.config.use_cache = by == "argument"
    given = {"use_cache": False} if by == "argument" else {}
    with torch.no_grad():
        want = model(ids, **given).logits
        with kvpatch.patched(model, "h2o", k):
            assert torch.equal(model(ids, **given).logits, want)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", [*MODELS, *MORE])
def test_logits_are_unchanged_in_every_dtype(name, dtype):
    model = make(name, dtype=dtype)
    ids, fed = prompt(2, 25), prompt(2, 6, seed=2)
    gives_nan = name in ("mpt", "bloom") and dtype == torch.float64  # transformers' own code does, over padding
    lengths = [25, 25 if gives_nan else 17]
    mask = left_pad(ids, lengths)
    want, _ = force(model, ids, fed, mask)
    with kvpatch.patched(model, "h2o", 1.0):
        got, cache = force(model, ids, fed, mask)
    # transformers' own MPT, GPT-J and BLOOM take their softmax in float32, whatever the dtype, and so are Falcon's slopes
    tolerance = 2e-5 if name in ("mpt", "gptj", "bloom", "falcon_alibi") and dtype == torch.float64 else TOLERANCE[dtype]
    torch.testing.assert_close(want, got, atol=tolerance, rtol=0)
    assert cache.get_seq_length() == 31
    assert cache.held(0)[:, 0].tolist() == [31, 6 + lengths[1]]


def test_the_full_policy_and_a_budget_above_the_text_change_nothing():
    model = make("llama_gqa")
    ids, fed = prompt(2, 20), prompt(2, 8, seed=2)
    want, _ = force(model, ids, fed)
    for policy, k in [("full", 0.5), ("roco", 28), ("tova", 1000), ("h2o", [1.0, 40]), ("snapkv", "1GiB")]:
        with kvpatch.patched(model, policy, k):
            got, cache = force(model, ids, fed)
        torch.testing.assert_close(want, got, atol=2e-5, rtol=0)
        assert cache.held(1).tolist() == [[28, 28], [28, 28]], policy


def test_assisted_decoding_is_unchanged():
    model, assistant = make("llama"), make("llama", layers=1)
    ids = prompt(1, 20)
    want = model.generate(ids, max_new_tokens=16, do_sample=False, assistant_model=copy.deepcopy(assistant))
    with kvpatch.patched(model, "h2o", 1.0), kvpatch.patched(assistant, "h2o", 1.0):
        got = model.generate(ids, max_new_tokens=16, do_sample=False, assistant_model=assistant)
    assert torch.equal(want, got)


def test_inputs_embeds_and_a_second_turn_are_unchanged():
    model = make("llama_gqa")
    ids, more = prompt(2, 20), prompt(2, 6, seed=3)

    def turns():
        embeds = model.get_input_embeddings()(ids)
        first = model.generate(
            inputs_embeds=embeds, max_new_tokens=5, do_sample=False, return_dict_in_generate=True, pad_token_id=0
        )
        whole = torch.cat([ids, first.sequences[:, -5:], more], 1)
        start = model.generate(ids, max_new_tokens=5, do_sample=False, return_dict_in_generate=True, pad_token_id=0)
        second = model.generate(whole, past_key_values=start.past_key_values, max_new_tokens=5, do_sample=False, pad_token_id=0)
        return torch.cat([first.sequences[:, -5:], second], 1)

    want = turns()
    with kvpatch.patched(model, "h2o", 1.0):
        assert torch.equal(want, turns())


def _gaps(B, n):
    """Masks [B,n] with padding before, between and behind the tokens of a row."""
    masks = {kind: torch.ones(B, n, dtype=torch.long) for kind in ("between", "behind", "everywhere")}
    masks["between"][0, 4:9] = 0
    masks["behind"][1, n - 6 :] = 0
    masks["everywhere"] = (torch.rand(B, n, generator=torch.Generator().manual_seed(5)) < 0.6).long()
    masks["everywhere"][:, 0], masks["everywhere"][:, 1] = 0, 1
    return masks


def _read_with_gaps(model, mask, positioned):
    """Logits of a prompt, of a second one whose padding lies behind the first, and of tokens; leading padding left out."""
    ids, more, fed = prompt(2, 20), prompt(2, 5, seed=4), prompt(2, 4, seed=2)
    takes = positioned and "position_ids" in inspect.signature(model.forward).parameters
    pieces = [(ids, mask), (more, mask[:, 8:13]), *((one, torch.ones_like(one)) for one in fed.split(1, 1))]
    past, logits, whole = None, [], mask[:, :0]
    for piece, own in pieces:
        whole = torch.cat([whole, own], 1)
        places = (whole.cumsum(1) - 1).clamp(min=0)[:, -piece.shape[1] :]
        kwargs = {"position_ids": places} if takes else {}
        with torch.no_grad():
            out = model(piece, attention_mask=whole, past_key_values=past, use_cache=True, **kwargs)
        past = out.past_key_values
        logits.append(out.logits[whole.cumsum(1)[:, -piece.shape[1] :] > 0])
    return torch.cat(logits)


@pytest.mark.parametrize("kind", ["between", "behind", "everywhere"])
@pytest.mark.parametrize("name", [*FIVE, "bloom", "falcon_alibi", "gemma2", "gemma3", "opt", "qwen2"])
def test_padding_behind_a_token_counts_as_it_does_unpatched(name, kind):
    """A sliding window and MPT's ALiBi reach over columns, Bloom's and Falcon's over tokens."""
    model = make(name) if name in (*FIVE, *MORE) else tiny_families.make(name)
    mask = _gaps(2, 20)[kind]
    for positioned in (True, False):
        want = _read_with_gaps(model, mask, positioned)
        with kvpatch.patched(model, "h2o", 1.0):
            got = _read_with_gaps(model, mask, positioned)
        torch.testing.assert_close(want, got, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["between", "behind", "everywhere"])
@pytest.mark.parametrize("name", [*FIVE, "bloom", "falcon_alibi"])
def test_generate_over_padding_behind_a_token_is_unchanged(name, kind):
    model, ids, mask = make(name), prompt(2, 20), _gaps(2, 20)[kind]
    for options in (KINDS["greedy"], KINDS["beams"], KINDS["chunked"] if name != "mpt" else KINDS["sampling"]):
        want = generate(model, ids, mask, **options)
        with kvpatch.patched(model, "h2o", 1.0):
            got = generate(model, ids, mask, **options)
        assert torch.equal(want.sequences, got.sequences)
        for a, b in zip(want.logits, got.logits, strict=True):
            torch.testing.assert_close(a, b, atol=TOLERANCE[torch.float32], rtol=0)


def test_a_forward_shows_no_spare_columns():
    """cache.layers[i].keys is as long as what it holds, as a DynamicCache's is; the buffer behind it stays, and is counted."""
    for name in FIVE:
        model, ids = make(name), prompt(2, 7)
        with torch.no_grad(), kvpatch.patched(model, "h2o", 1.0):
            cache, buffers = model(ids, use_cache=True).past_key_values, set()
            assert {(one.keys.shape[2], one.values.shape[2]) for one in cache.layers} == {(7, 7)}, name
            shown = sum(tensor.nbytes for one in cache.layers for tensor in (one.keys, one.values))
            assert shown < cache.nbytes
            buffers.add(cache.layers[1].keys.data_ptr())
            for seen in (8, 9, 10):
                model(ids[:, :1], past_key_values=cache)
                assert {one.keys.shape[2] for one in cache.layers} == {seen}, name
                buffers.add(cache.layers[1].keys.data_ptr())
            assert len(buffers) == 1, "nothing moves while there is room"
            model(ids[:, :4], past_key_values=cache)
            assert {one.keys.shape[2] for one in cache.layers} == {14}, name


DEEDS = {
    "nothing": lambda cache: cache,
    "clone": lambda cache: cache.clone(),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])) or cache,
    "select": lambda cache: cache.batch_select_indices(torch.tensor([-1])) or cache,
    "repeat": lambda cache: cache.batch_repeat_interleave(2) or cache,
    "crop": lambda cache: cache.crop(-3) or cache,
    "join": lambda cache: kvpatch.EvictingCache.concatenate([cache]),
}


@pytest.mark.parametrize("deed", DEEDS)
def test_what_is_done_to_a_cache_between_forwards_meets_its_whole_buffers(deed):
    """Against transformers' own cache, for what that can do, too."""
    model, ids, fed = make("llama_gqa"), prompt(2, 12), prompt(8, 4, seed=2)

    def run(past):
        logits = []
        for t in range(4):
            past = DEEDS[deed](past) if t in (0, 2) else past
            rows = past.layers[0].keys.shape[0]
            logits.append(model(fed[:rows, t : t + 1], past_key_values=past).logits)
        return logits

    with torch.no_grad():
        plain = model(ids, use_cache=True).past_key_values
        native = deed in ("nothing", "reorder", "select", "repeat", "crop")
        want = run(plain) if native else None
        with kvpatch.patched(model, "h2o", 1.0):
            got = run(model(ids, use_cache=True).past_key_values)
            if want is None:
                want = run_plainly(model, ids, fed)
    for one, other in zip(want, got, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=0)


def run_plainly(model, ids, fed):
    past, logits = model(ids, use_cache=True).past_key_values, []
    for t in range(4):
        logits.append(model(fed[:2, t : t + 1], past_key_values=past).logits)
    return logits


def test_padding_whose_window_holds_no_token_is_undefined_unpatched_too():
    """There implementations of attention differ from each other; tokens and all other padding are as unpatched."""
    model, ids, mask = make("mistral_sliding"), prompt(1, 30), torch.ones(1, 30, dtype=torch.long)
    mask[:, 8:25] = 0
    logits = {}
    with torch.no_grad():
        for name in ("sdpa", "eager"):
            model.set_attn_implementation(name)
            logits[name] = model(ids, attention_mask=mask).logits
        with kvpatch.patched(model, "h2o", 1.0):
            got = model(ids, attention_mask=mask).logits
    apart = (logits["sdpa"] - logits["eager"]).abs().amax(-1)[0] > 1e-3
    assert apart.nonzero().flatten().tolist() == list(range(19, 25)), "queries that see columns 8 and on alone"
    torch.testing.assert_close(got[:, ~apart], logits["sdpa"][:, ~apart], atol=2e-5, rtol=0)
    assert got.isfinite().all()


def test_a_cache_from_outside_counts_padding_behind_a_token_too():
    model, ids, mask = make("mpt"), prompt(2, 20), _gaps(2, 20)["everywhere"]
    step, more = prompt(2, 1, seed=3), torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
    with torch.no_grad():
        past = model(ids, attention_mask=mask, use_cache=True).past_key_values
        want = model(step, attention_mask=more, past_key_values=copy.deepcopy(past)).logits
        with kvpatch.patched(model, "h2o", 1.0) as patch:
            cache = patch.new_cache()
            from_dynamic.absorb(cache, past, mask)
            got = model(step, attention_mask=more, past_key_values=cache).logits
    torch.testing.assert_close(want, got, atol=2e-5, rtol=0)


def test_rows_with_padding_behind_a_token_do_not_join():
    """Their position_ids count tokens and their distances columns, so that no position goes on from both."""
    model, ids, mask = make("mistral_sliding"), prompt(2, 20), _gaps(2, 20)["between"]
    with torch.no_grad(), kvpatch.patched(model, "h2o", 1.0):
        places = (mask.cumsum(1) - 1).clamp(min=0)
        cache = model(ids, attention_mask=mask, position_ids=places, use_cache=True).past_key_values
        with pytest.raises(kvpatch.KVPatchError, match="rows with padding, .* or read the prompts unpadded"):
            kvpatch.EvictingCache.concatenate([cache])


@pytest.mark.parametrize("name", ["mistral_sliding", "mpt"])
def test_under_a_budget_a_row_with_padding_anywhere_is_as_alone(name):
    """Where tokens are evicted distances are those of the row's own text, not of columns as in the tests above."""
    model, ids, fed, mask = make(name), prompt(2, 20), prompt(2, 4, seed=2), _gaps(2, 20)["between"]
    with kvpatch.patched(model, "h2o", 0.5):
        batch, cache = force(model, ids, fed, mask)
        alone, single = force(model, ids[:1, mask[0].bool()], fed[:1])
    torch.testing.assert_close(batch[:1], alone, atol=2e-5, rtol=0)
    assert torch.equal(cache.positions(1)[:1].amax(-1), single.positions(1).amax(-1))


@pytest.mark.parametrize("name", ["llama_gqa", "gptj", "bloom", "falcon"])
def test_a_static_cache_compiles_to_one_graph_as_it_does_unpatched(name):
    """The decode step of transformers' own static cache, which at 1.0 runs the model's own code."""
    model, ids = make(name), prompt(2, 12)
    if not model._can_compile_fullgraph:
        pytest.skip("no static cache for it")
    whole = CompileConfig(fullgraph=True, dynamic=False, backend="eager")
    whole._compile_all_devices = True
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
    want = model.generate(ids, **options, disable_compile=True)
    with kvpatch.patched(model, "h2o", 1.0):
        torch.compiler.reset()
        model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)  # a pass of ours before
        got = model.generate(ids, **options, compile_config=whole)
        assert hasattr(model, "_compiled_call")
    torch.compiler.reset()
    assert torch.equal(want, got)


@pytest.mark.parametrize("name", ["mistral_sliding", "mpt"])
def test_a_cache_with_padding_behind_a_token_goes_on_from_a_file_and_knows_its_tokens(name, tmp_path):
    model, ids, mask, step = make(name), prompt(2, 20), _gaps(2, 20)["everywhere"], prompt(2, 1, seed=3)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    takes = {} if name == "mpt" else {"position_ids": places}
    with torch.no_grad(), kvpatch.patched(model, "h2o", 1.0) as patch:
        cache = model(ids, attention_mask=mask, use_cache=True, **takes).past_key_values
        assert cache.next_positions()[:, 0].tolist() == mask.sum(1).tolist() == list(patch.report().lengths)
        patch.save_cache(cache, tmp_path / "cache.safetensors")
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.reorder_cache(torch.tensor([1, 0]))
        loaded, logits = patch.load_cache(tmp_path / "cache.safetensors"), []
        for one in (cache, loaded):
            assert one.next_positions()[:, 0].tolist() == mask.sum(1).tolist()
            logits.append(model(step, past_key_values=one, **({k: one.next_positions() for k in takes})).logits)
    assert torch.equal(*logits)
