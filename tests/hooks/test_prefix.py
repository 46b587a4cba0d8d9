"""Prefixes: read once, texts go on from them as from a cache that read them anew, and do not disturb one another."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

import kvpatch
from tests.helpers.serving import prompts
from tests.helpers.tiny import make, prompt
from tests.helpers.tiny_families import SOUND, make_listener

DOCUMENT, QUESTION, OTHER = (torch.tensor([ids]) for ids in prompts((70, 11, 6), seed=2))
WHOLE = torch.cat([DOCUMENT, QUESTION], 1)
SETTINGS = [
    ("h2o", 0.4, {}),
    ("keyformer", 24, {}),
    ("snapkv", 24, {"turns": "first"}),
    ("adakv", 0.4, {}),
    ("window", 24, {"block": 16}),
    ("h2o", 24, {"bits": 8}),
    ("kvzip", 24, {}),
]


def anew(patch, model):
    cache = patch.new_cache()
    with torch.no_grad():
        model(DOCUMENT, past_key_values=cache)
    return cache


def asked(model, past, whole=WHOLE, new=8):
    given = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(whole, past_key_values=past, output_logits=True, return_dict_in_generate=True, **given)
    return torch.stack(found.logits), found.past_key_values


@pytest.mark.parametrize(("policy", "k", "options"), SETTINGS, ids=str)
def test_as_if_read_anew(policy, k, options):
    """Logits are equal bit for bit, and kept positions, after several texts that began with it and with a second reading."""
    model = make("llama_gqa")
    with kvpatch.patched(model, policy, k, **options) as patch:
        prefix = patch.prefix(DOCUMENT)
        before = [prefix.positions(layer) for layer in range(2)]
        for whole in (torch.cat([DOCUMENT, OTHER], 1), WHOLE, WHOLE):
            got, own = asked(model, prefix, whole)
            expected, cache = asked(model, anew(patch, model), whole)
            assert torch.equal(got, expected)
            assert all(torch.equal(own.positions(layer), cache.positions(layer)) for layer in range(2))
        assert all(torch.equal(prefix.positions(layer), before[layer]) for layer in range(2))
        with torch.no_grad():
            one, two = (model(QUESTION, past_key_values=past).logits for past in (prefix, anew(patch, model)))
        assert torch.equal(one, two)


def test_several_rows_and_beams_begin_with_it():
    """Rows of one length as each alone, beams and samples as from a cache whose rows were repeated by hand."""
    model = make("llama_gqa")
    texts = torch.cat([WHOLE, torch.cat([DOCUMENT, torch.tensor(prompts((11,), seed=7))], 1)])
    given = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with kvpatch.patched(model, "h2o", 16) as patch:
        prefix = patch.prefix(DOCUMENT)
        alone = torch.cat([model.generate(text[None], past_key_values=prefix, **given) for text in texts])
        assert torch.equal(model.generate(texts, past_key_values=prefix, **given), alone)
        for more in ({"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}):
            rows = 3 if "num_beams" in more else 2
            by_hand = anew(patch, model)
            by_hand.batch_repeat_interleave(rows)
            torch.manual_seed(0)
            want = model.generate(WHOLE, past_key_values=by_hand, **given | more)
            torch.manual_seed(0)
            assert torch.equal(model.generate(WHOLE, past_key_values=prefix, **given | more), want)
        with torch.no_grad():
            two = model(texts[:, 70:], past_key_values=prefix).logits
            one = torch.cat([model(text[None, 70:], past_key_values=prefix).logits for text in texts])
        torch.testing.assert_close(two, one, atol=1e-5, rtol=0)
        other = texts.clone()
        other[1, 5] += 1
        with pytest.raises(kvpatch.KVPatchError, match="at column 5 of row 1"):
            model.generate(other, past_key_values=prefix, **given)


def test_it_is_read_once_and_shared():
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 16) as patch:
        prefix = patch.prefix(DOCUMENT)
        assert prefix is patch.prefix(DOCUMENT[0]) is patch.prefix(DOCUMENT[0].tolist()) and len(patch.prefixes) == 1
        assert patch.passes["prompt"][0] == 1
        assert prefix.nbytes == patch.prefixes.nbytes == anew(patch, model).nbytes and int(prefix.held(0).max()) == 16
        asked(model, prefix), asked(model, prefix.copy())
        assert repr(prefix) == f"<Prefix of 70 tokens: {prefix.nbytes} bytes, 2 texts began with it>"
        patch.prefixes.drop(prefix)
        assert not list(patch.prefixes) and patch.prefix(DOCUMENT) is not prefix
        with pytest.raises(kvpatch.KVPatchError, match="not kept by this patch: drop one of patch.prefixes"):
            patch.prefixes.drop(prefix)


def test_one_that_was_read_with_dropout_is_read_anew():
    model = make("gpt2").train()
    for block in model.transformer.h:
        block.attn.attn_dropout.p = 0.0
    with kvpatch.patched(model, "h2o", 16) as patch:
        noisy = patch.prefix(DOCUMENT)
        assert patch.prefix(DOCUMENT) is noisy
        model.eval()
        assert torch.equal(asked(model, patch.prefix(DOCUMENT))[0], asked(model, anew(patch, model))[0])
        assert len(patch.prefixes) == 1


def test_refused():
    model, other = make("llama_gqa"), make("llama_gqa")
    with torch.no_grad():
        next(other.parameters()).mul_(1.5)
    with kvpatch.patched(model, "h2o", 16) as patch:
        prefix = patch.prefix(DOCUMENT)
        want, _ = asked(model, prefix)
        with pytest.raises(kvpatch.KVPatchError, match="differ"):
            asked(model, prefix, torch.cat([OTHER, WHOLE], 1))
        for bad, words in (([], "a list"), ([1.5], "a list"), (torch.ones(2, 3, dtype=torch.long), r"tensor \[2, 3\]")):
            with pytest.raises(kvpatch.KVPatchError, match=f"A prefix is one text.*{words}"):
                patch.prefix(bad)
    with kvpatch.patched(model, "h2o", 16):
        assert torch.equal(asked(model, prefix)[0], want), "another block of the same settings takes it"
    with pytest.raises(AttributeError, match="inside a block of its model"):
        model(QUESTION, past_key_values=prefix)
    for owner, policy, k, words in (
        (model, "roco", 16, "policy's name is 'h2o' there"),
        (model, "h2o", 17, "k is 16 there"),
        (other, "h2o", 16, "Another model has read this prefix.*weights is.*patch.prefix"),
    ):
        with kvpatch.patched(owner, policy, k), pytest.raises(kvpatch.KVPatchError, match=words):
            asked(owner, prefix)
        with kvpatch.patched(owner, policy, k), pytest.raises(kvpatch.KVPatchError, match=words):
            owner(QUESTION, past_key_values=prefix)


def test_a_text_with_a_sound_is_no_prefix():
    with kvpatch.patched(make_listener(), "h2o", 24) as patch:
        patch.prefix([3, 4, 5])
        with pytest.raises(kvpatch.KVPatchError, match=rf"holds token {SOUND}, which stands for a sound.*input_features="):
            patch.prefix([3, 4, SOUND, 5])


def test_a_text_that_invokes_an_adapter_is_no_prefix():
    """PEFT's aLoRA acts from its tokens on, of which generate() tells it: https://github.com/huggingface/peft/pull/2609"""
    names, calls = ["q_proj", "k_proj", "v_proj"], [11, 12]
    base = make("llama_gqa", dtype=torch.float64)
    config = {"r": 4, "lora_alpha": 64, "init_lora_weights": False, "task_type": "CAUSAL_LM", "target_modules": names}
    model = get_peft_model(base, LoraConfig(**config, alora_invocation_tokens=calls)).double().eval()
    ids = prompt(1, 30)
    ids[0, 20:22] = torch.tensor(calls)

    def run(**options):
        return model.generate(input_ids=ids, max_new_tokens=5, do_sample=False, pad_token_id=0, **options)

    want = run()
    with model.disable_adapter():
        assert not torch.equal(run(), want)
    with kvpatch.patched(model, "h2o", 60) as patch:
        assert torch.equal(run(past_key_values=patch.prefix(ids[:, :20])), want)
        with pytest.raises(
            kvpatch.KVPatchError, match=r"adapter 'default' by its tokens \[11, 12\] at 20.*patch\.prefix\(ids\[:20\]\)"
        ):
            patch.prefix(ids[:, :25])
        with model.disable_adapter():
            patch.prefix(ids[:, :25])
