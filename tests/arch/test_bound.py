"""Norms of the second stage: the rows of the output projection that really runs."""

import torch
from peft import LoraConfig, get_peft_model

import kvpatch
from kvpatch.arch.bound import BoundAdapter
from kvpatch.arch.llama import LlamaAdapter
from tests.helpers.tiny import force, make, prompt


def test_two_stage_selection_sees_the_projection_that_runs():
    """A LoRA on the output projection, or an offloaded one, has no plain weight: it is asked for its rows."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    ids, fed = prompt(2, 40), prompt(2, 6, seed=2)
    policy = kvpatch.policies.critical("h2o", alpha=0.0)

    def run(model):
        with kvpatch.patched(model, policy, 0.4):
            logits, cache = force(model, ids, fed)
        return logits, [cache.positions(layer).sort(-1).values for layer in range(2)]

    config = LoraConfig(r=8, target_modules=["o_proj"], lora_alpha=64, init_lora_weights=False, lora_dropout=0.5)
    torch.manual_seed(0)
    wrapped = get_peft_model(make("llama_gqa"), config).eval()
    attn = wrapped.base_model.model.model.layers[0].self_attn
    values, bound_adapter = torch.zeros(1, 2, 1, 8), BoundAdapter(LlamaAdapter(), attn, 2)
    rows, worked_out = bound_adapter.output_rows(values, 2)
    assert worked_out
    wrapped.train()
    assert torch.equal(rows, bound_adapter.output_rows(values, 2)[0]), "LoRA's dropout is no part of the weight"
    assert attn.o_proj.training
    wrapped.eval()
    logits, held = run(wrapped)
    merged = wrapped.merge_and_unload()
    want, kept = run(merged)
    torch.testing.assert_close(logits, want, atol=1e-4, rtol=0)
    assert all(map(torch.equal, held, kept))
    _, other = run(make("llama_gqa"))
    assert not all(map(torch.equal, kept, other))
    for layer in merged.model.layers:
        add_hook_to_module(layer.self_attn.o_proj, AlignDevicesHook(execution_device="cpu", offload=True))
        assert layer.self_attn.o_proj.weight.is_meta
    again, held = run(merged)
    torch.testing.assert_close(again, want, atol=1e-4, rtol=0)
    assert all(map(torch.equal, held, kept))
