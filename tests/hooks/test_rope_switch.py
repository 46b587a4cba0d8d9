"""Models that rotate their tokens otherwise once a text is long (longrope, dynamic): right, or refused in words.

Phi 3 drops its cache at that length and reads the text anew. https://github.com/huggingface/transformers/pull/33129
"""

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

import kvpatch
from kvpatch.arch.rotary import switch_length
from tests.helpers.marks import batches, since
from tests.helpers.tiny import IDS, VOCAB, make, prompt

LIMIT = 32
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, **IDS,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0,
    "original_max_position_embeddings": LIMIT,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def switching(kind):
    torch.manual_seed(0)
    if kind == "dynamic":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=LIMIT, rope_parameters=DYNAMIC))
    else:
        more = {"max_position_embeddings": 128, "original_max_position_embeddings": LIMIT, "sliding_window": None}
        model = Phi3ForCausalLM(Phi3Config(**SIZES, **more, rope_parameters=LONGROPE))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, 0.0, 0.25)
    return model.double().eval()


def generate(model, ids, new, **options):
    return model.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0, **options)


SWITCHES = since("5.24", "texts that go past Phi 3's switch were not looked at")


def test_lengths_at_which_models_switch():
    assert [switch_length(switching(kind)) for kind in ("longrope", "dynamic")] == [LIMIT, LIMIT]
    assert switch_length(make("llama_gqa")) is None


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_lossless_generates_up_to_there_and_no_further(kind):
    model, ids = switching(kind), prompt(1, 26)
    want = generate(model, ids, LIMIT + 1 - 26)
    with kvpatch.patched(model, "h2o", 8, lossless=True):
        assert torch.equal(generate(model, ids, LIMIT + 1 - 26), want)
        with pytest.raises(kvpatch.KVPatchError, match=r"than 32 tokens.*have 34: give max_new_tokens=7 or less, or"):
            generate(model, ids, LIMIT + 2 - 26)
        with pytest.raises(kvpatch.KVPatchError, match=r"may have 45: leave lossless out"):
            generate(model, prompt(1, 40), 5)


@SWITCHES
@pytest.mark.parametrize("policy", ["h2o", "snapkv"])
def test_generate_goes_beyond(policy):
    model, ids = switching("longrope"), prompt(1, 26)
    want = generate(model, ids, 12)
    with kvpatch.patched(model, policy, 60):
        assert torch.equal(generate(model, ids, 12), want)


@SWITCHES
def test_drafts_that_would_meet_the_switch_are_refused():
    model, ids = switching("longrope"), prompt(1, 26)
    unpatched = generate(model, ids, 12, prompt_lookup_num_tokens=3)
    with kvpatch.patched(model, "h2o", 60):
        want = generate(model, ids, LIMIT - 26)
        assert torch.equal(generate(model, ids, LIMIT - 26, prompt_lookup_num_tokens=3), want)
        for asked in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": switching("dynamic")}):
            with pytest.raises(kvpatch.KVPatchError, match=r"reads a text anew.*give max_new_tokens=6 or less, or leave"):
                generate(model, ids, LIMIT + 1 - 26, **asked)
        with pytest.raises(kvpatch.KVPatchError, match=r"cannot be taken back there: leave the ass"):
            generate(model, prompt(1, 40), 6, prompt_lookup_num_tokens=3)
    with kvpatch.patched(model, "h2o", 1.0):
        assert torch.equal(generate(model, ids, 12, prompt_lookup_num_tokens=3), unpatched)


@batches
def test_requests_of_one_pass_are_rotated_alike():
    """A longer text beside it would change what a short one says: under the unpatched engine it does."""
    model, short, long = switching("longrope"), prompt(1, 20), prompt(1, 50, seed=4)
    config = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with kvpatch.patched(model, "h2o", 60):
        found = model.generate_batch([short[0].tolist(), long[0].tolist()], generation_config=config)
        one, other = found["req_0"], found["req_1"]
        assert one.generated_tokens == generate(model, short, 6)[0, 20:].tolist()
        assert "needs 55 positions, but in continuous batching this model has 32" in other.error
