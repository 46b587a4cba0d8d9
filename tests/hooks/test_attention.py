"""A pass whose cache does not reach an attention layer is noticed; a row of padding alone is read where no cache stays."""

from contextlib import nullcontext

import pytest
import torch

import kvpatch
from tests.helpers.tiny import make, prompt


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(("B", "Q"), [(2, 12), (1, 1)])
@pytest.mark.parametrize("name", ["llama_gqa", "mpt"])
def test_a_cache_that_gradient_checkpointing_takes_away_is_missed(name, B, Q, reentrant):
    model = make(name).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    words = r"did not reach an attention layer.*model\.eval\(\)"
    with kvpatch.patched(model, "h2o", 0.5) as handle, pytest.raises(kvpatch.KVPatchError, match=words):
        model(prompt(B, Q), past_key_values=handle.new_cache())


def test_a_mask_that_the_model_replaces_is_missed():
    """A pass that keeps no cache has its own on the mask; without it every token would see all others."""
    model = make("llama_gqa")

    def copied(module, args, kwargs):
        return args, {**kwargs, "attention_mask": torch.tensor(kwargs["attention_mask"].tolist())}

    hook = model.model.layers[1].self_attn.register_forward_pre_hook(copied, with_kwargs=True)
    words = "did not reach an attention layer"
    with kvpatch.patched(model, "h2o", 0.5, block=4), pytest.raises(kvpatch.KVPatchError, match=words):
        model(prompt(1, 12), use_cache=False)
    hook.remove()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("replayed", [True, False])
def test_checkpointed_layers_are_run_again_inside_the_block(replayed, reentrant):
    model, ids = make("llama_gqa"), prompt(1, 16)
    with kvpatch.patched(model, "h2o", 6, block=4, record=True) as patch:
        model.generate(ids, max_new_tokens=4, do_sample=False)
        record = patch.record()
    model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with kvpatch.replay(model, record) if replayed else kvpatch.patched(model, "h2o", 6, block=4):
        loss = model(ids, labels=ids, use_cache=False).loss
    with pytest.raises(kvpatch.KVPatchError, match=r"came after the block: call backward\(\) inside"):
        loss.backward()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["llama_gqa", "gpt2", "mpt"])
def test_a_row_of_padding_alone_changes_nothing_where_no_cache_stays(name, training):
    """An empty text in a batch: the unpatched model ignores it, and so does the loss and its gradients under a budget."""
    model, ids = make(name).train(training), prompt(2, 16)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[0, :5] = mask[1] = 0
    labels = ids.masked_fill(mask == 0, -100)

    def step(rows, patching):
        model.zero_grad()
        given = {"input_ids": ids[:rows], "attention_mask": mask[:rows], "labels": labels[:rows], "use_cache": False}
        with kvpatch.patched(model, "h2o", 6, block=4) if patching else nullcontext():
            loss = model(**given).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    for patching in (False, True):
        for one, other in zip(step(2, patching), step(1, patching), strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    with kvpatch.patched(model.eval(), "h2o", 6), pytest.raises(kvpatch.KVPatchError, match="Row 1 .* the collator or the"):
        model(ids, attention_mask=mask)
