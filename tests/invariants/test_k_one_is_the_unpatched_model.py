"""Law 1: k=1.0 changes nothing, whatever the policy, architecture, batch, padding, decoding and dtype."""

import copy

import pytest
import torch

import kvpatch
from tests.helpers.tiny import FIVE, MODELS, force, left_pad, make, prompt

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


@pytest.mark.spread
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left-padded"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FIVE)
def test_generate_is_unchanged(name, kind, padded):
    if kind == "lookup" and padded:
        pytest.skip("transformers looks prompts up for one row only")
    model = make(name)
    ids = prompt(1 if kind == "lookup" else 2, 30)
    mask = left_pad(ids, [30, 21]) if padded else torch.ones_like(ids)
    if kind == "chunked" and padded and name == "mpt":
        pytest.skip("unpatched MPT shifts its ALiBi bias when a padded prompt comes in pieces")
    want = generate(model, ids, mask, **KINDS[kind])
    with kvpatch.patched(model, "keyformer", 1.0):
        got = generate(model, ids, mask, **KINDS[kind])
    assert torch.equal(want.sequences, got.sequences)
    for a, b in zip(want.logits, got.logits, strict=True):
        torch.testing.assert_close(a, b, atol=TOLERANCE[torch.float32], rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_unchanged_in_every_dtype(name, dtype):
    model = make(name, dtype=dtype)
    ids, fed = prompt(2, 25), prompt(2, 6, seed=2)
    lengths = [25, 25] if name == "mpt" and dtype == torch.float64 else [25, 17]  # transformers' MPT gives NaN there
    mask = left_pad(ids, lengths)
    want, _ = force(model, ids, fed, mask)
    with kvpatch.patched(model, "h2o", 1.0):
        got, cache = force(model, ids, fed, mask)
    # transformers' own MPT and GPT-J take their softmax in float32, whatever the dtype
    tolerance = 2e-5 if name in ("mpt", "gptj") and dtype == torch.float64 else TOLERANCE[dtype]
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
        second = model.generate(
            whole, past_key_values=start.past_key_values, max_new_tokens=5, do_sample=False, pad_token_id=0
        )
        return torch.cat([first.sequences[:, -5:], second], 1)

    want = turns()
    with kvpatch.patched(model, "h2o", 1.0):
        assert torch.equal(want, turns())
