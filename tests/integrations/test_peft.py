"""PEFT's adapters inside the block: trained, generated with, switched, merged; or refused in words."""

import peft
import pytest
import torch
from packaging.version import Version
from peft import (
    CartridgeConfig,
    IA3Config,
    LoraConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)

import kvpatch
from examples import finetune_lora
from kvpatch.arch.upstream import CACHE
from kvpatch.hooks import versions
from tests.helpers.tiny import make, prompt

ATTENTION = {"llama_gqa": ["q_proj", "k_proj", "v_proj", "o_proj"], "gpt2": ["c_attn", "c_proj"], "mpt": ["Wqkv", "out_proj"]}
VIRTUAL = 6
OLD_PEFT = CACHE == "cache" and Version(peft.__version__) <= Version(versions.PEFT_BY_OLD_NAME)
PROMPTS = {
    "prompt tuning": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL),
    "P-tuning": PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL, encoder_hidden_size=16),
}


def gradients(model, ids):
    """The loss and every gradient of one step, which is not taken."""
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def generate(model, ids):
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    out = model.generate(input_ids=ids, output_logits=True, return_dict_in_generate=True, **options)
    return torch.stack(out.logits, 1)


def lora(name, **options):
    torch.manual_seed(5)
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=ATTENTION[name], r=4, init_lora_weights=False, **options)
    return get_peft_model(make(name), config)


def test_the_lora_example():
    found = finetune_lora.main(steps=2)
    assert found["same"] and found["inside"][0] == found["outside"][0] and found["held"].eq(16).all()
    inside, outside = found["merged"]
    torch.testing.assert_close(found["wrapped"], inside, atol=1e-3, rtol=0)
    assert torch.equal(inside, outside)
    assert (found["off"][0] - found["wrapped"][0]).abs().max() > 0.01


def test_the_lora_example_under_the_budget():
    found = finetune_lora.main(steps=2, block=16)
    assert not found["same"] and found["inside"][0][0] != found["outside"][0][0]
    assert all(weight.abs().max() > 0 for weight in found["inside"][1]), "what starts at zero has learned from the evicted loss"


@pytest.mark.parametrize("name", ATTENTION)
def test_lora_gradients_are_bit_for_bit_the_same(name):
    model, ids = lora(name, lora_dropout=0.1).train(), prompt(2, 24)
    torch.manual_seed(3)
    want = gradients(model, ids)
    with kvpatch.patched(model, "keyformer", 0.3):
        torch.manual_seed(3)
        got = gradients(model, ids)
    assert len(want) > 8 and all(map(torch.equal, want, got))


@pytest.mark.parametrize("name", ATTENTION)
def test_a_replay_of_adapters_sees_what_their_rollout_saw(name):
    """The replayed logits are the rollout's, and gradients reach every adapter."""
    model, ids = lora(name).double(), prompt(2, 24)
    with kvpatch.patched(model, "h2o", 8, record=True) as patch:
        drawn = model.generate(
            input_ids=ids, max_new_tokens=9, do_sample=False, output_logits=True, return_dict_in_generate=True, pad_token_id=0
        )
        record = patch.record()
    with kvpatch.replay(model.eval(), record):
        logits = model(input_ids=drawn.sequences[:, :-1]).logits[:, 23:]
        logits.square().mean().backward()
    torch.testing.assert_close(logits.float(), torch.stack(drawn.logits, 1), atol=1e-5, rtol=0)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained and all(p.grad is not None and p.grad.abs().max() > 0 for p in trained)
    with torch.no_grad():
        dense = model(input_ids=drawn.sequences[:, :-1]).logits[:, 23:]
    assert (dense - logits).abs().max() > 1e-4, "outside of the replay nothing is evicted"


def test_lora_trains_under_a_budget_as_its_merged_model_would():
    """The gradient of a merged weight W + BA/s, split by the chain rule into those of A and B."""
    model, ids = lora("llama_gqa").double().train(), prompt(2, 24)
    with kvpatch.patched(model, "h2o", 7, block=6):
        loss = gradients(model, ids)[0]
    attention = model.base_model.model.model.layers[0].self_attn
    pairs = [(p.lora_A["default"].weight, p.lora_B["default"].weight, p.scaling["default"]) for p in
             (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)]  # fmt: skip
    mine = [(a.detach(), b.detach(), a.grad, b.grad, scale) for a, b, scale in pairs]
    merged = model.merge_and_unload().requires_grad_(True)
    with kvpatch.patched(merged, "h2o", 7, block=6):
        torch.testing.assert_close(gradients(merged, ids)[0], loss, atol=1e-6, rtol=0)
    attention = merged.model.layers[0].self_attn
    for (a, b, grad_a, grad_b, scale), name in zip(mine, ATTENTION["llama_gqa"], strict=True):
        whole = getattr(attention, name).weight.grad
        torch.testing.assert_close(grad_b, scale * whole @ a.T, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(grad_a, scale * b.T @ whole, atol=1e-6, rtol=1e-4)


def test_adapters_are_added_switched_and_merged_inside_the_block():
    model, ids = lora("llama_gqa").eval(), prompt(2, 24)
    model.add_adapter("other", LoraConfig(target_modules=["v_proj"], r=2, init_lora_weights=False))
    want = {}
    for adapter in ("default", "other"):
        model.set_adapter(adapter)
        with kvpatch.patched(model, "h2o", 0.4):
            want[adapter] = generate(model, ids)
    plain = make("llama_gqa")
    with kvpatch.patched(plain, "h2o", 0.4):
        want["none"] = generate(plain, ids)
    with kvpatch.patched(model, "h2o", 0.4) as patch:
        for adapter in ("default", "other", "default"):
            model.set_adapter(adapter)
            assert torch.equal(generate(model, ids), want[adapter])
        with model.disable_adapter():
            torch.testing.assert_close(generate(model, ids), want["none"], atol=1e-5, rtol=0)
        merged = model.merge_and_unload(adapter_names=["default"])
        torch.testing.assert_close(generate(merged, ids), want["default"], atol=1e-4, rtol=0)
        assert patch.report().held().eq(9).all()
    assert not any("_kvpatch" in vars(module) for module in merged.modules())
    with kvpatch.patched(merged, "h2o", 0.4):
        torch.testing.assert_close(generate(merged, ids), want["default"], atol=1e-4, rtol=0)


def test_ia3_scales_keys_and_values_before_they_are_kept():
    targets = {"target_modules": ["k_proj", "v_proj"], "feedforward_modules": []}
    config = IA3Config(task_type="CAUSAL_LM", init_ia3_weights=False, **targets)
    torch.manual_seed(5)
    model, ids = get_peft_model(make("llama_gqa"), config).eval(), prompt(2, 24)
    whole = generate(model, ids)
    with kvpatch.patched(model, "h2o", 1.0):
        torch.testing.assert_close(generate(model, ids), whole, atol=1e-5, rtol=0)
    with kvpatch.patched(model, "h2o", 0.4):
        kept = generate(model, ids)
    merged = model.merge_and_unload()
    with kvpatch.patched(merged, "h2o", 0.4):
        torch.testing.assert_close(generate(merged, ids), kept, atol=1e-4, rtol=0)


@pytest.mark.skipif(OLD_PEFT, reason="this PEFT puts its prompt before every token, without a patch too")
@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize("name", ["llama_gqa", "gpt2"])
def test_virtual_tokens_belong_to_the_prompt(name, kind):
    """A share counts them, and none of the prompt's own tokens is taken for a generated one."""
    torch.manual_seed(0)
    model, ids = get_peft_model(make(name), PROMPTS[kind]), prompt(2, 24)
    want = gradients(model.train(), ids) if name == "llama_gqa" else []
    whole = generate(model.eval(), ids)
    with kvpatch.patched(model, "h2o", 1.0):
        torch.testing.assert_close(generate(model, ids), whole, atol=1e-5, rtol=0)
        assert all(map(torch.equal, gradients(model.train(), ids) if want else [], want))
    model.eval()
    with kvpatch.patched(model, "snapkv", 0.5, window=4) as patch:
        logits = generate(model, ids)
        assert patch.report().held().eq((24 + VIRTUAL) // 2 + 4).all(), "snapkv keeps what is generated"
        past, fed = None, [ids, *logits[:, :-1].argmax(-1, keepdim=True).unbind(1)]
        with torch.no_grad():  # the loop that a user would write, to compare with
            for t, tokens in enumerate(fed):
                run = model if past is None else model.get_base_model()
                out = run(input_ids=tokens, past_key_values=past, use_cache=True)
                past = out.past_key_values
                torch.testing.assert_close(out.logits[:, -1], logits[:, t], atol=1e-5, rtol=0)


@pytest.mark.skipif(not OLD_PEFT, reason="this PEFT finds the cache")
def test_a_prompt_before_every_token_is_refused():
    model, ids = get_peft_model(make("llama_gqa"), PROMPTS["prompt tuning"]).eval(), prompt(1, 24)
    with kvpatch.patched(model, "h2o", 0.5), pytest.raises(kvpatch.KVPatchError, match="puts its tuned prompt before every"):
        generate(model, ids)


@pytest.mark.parametrize("config", [PrefixTuningConfig, CartridgeConfig])
def test_caches_that_peft_brings_are_refused_in_words(config):
    model = get_peft_model(make("llama_gqa"), config(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(kvpatch.KVPatchError, match=r"(prefix tuning|cartridges) brings? a KV cache.*so does prompt tuning"):
        kvpatch.patch(model, "h2o", 0.5)
