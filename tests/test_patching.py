"""A patched model: what it shares with its copies, its threads and what else changes it."""

import copy
import gc
import threading
import weakref
from types import MethodType

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_submodules
from peft import LoraConfig, PrefixTuningConfig, get_peft_model

import kvpatch
from tests.helpers.tiny import force, make, prompt, snapshot


def test_state_dict_is_unchanged_inside():
    model = make("gpt2")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with kvpatch.patched(model, "h2o", 0.3):
        inside = model.state_dict()
    assert before.keys() == inside.keys()
    assert all(torch.equal(before[key], inside[key]) for key in before)


def test_a_deepcopy_inside_the_block_uses_its_own_weights():
    model, ids, fed = make("llama_gqa"), prompt(1, 20), prompt(1, 5, seed=2)
    with kvpatch.patched(model, "h2o", 0.5):
        twin = copy.deepcopy(model)
        want, _ = force(model, ids, fed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        got, cache = force(twin, ids, fed)
    assert torch.equal(want, got)
    assert cache.held(0).tolist() == [[10, 10]]


def test_methods_of_a_deepcopy_are_its_own():
    """Hooks of accelerate keep the forward of an attention module on it; some wrap generate() on the model."""
    model, ids = make("llama_gqa"), prompt(1, 20)
    for module in model.modules():
        if kvpatch.arch.adapter.adapter_of(module) is not None:
            add_hook_to_module(module, AlignDevicesHook())
    model.generate = MethodType(type(model).generate, model)

    def run(model):
        logits = model(ids, use_cache=False).logits
        return logits, model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)

    want = run(model)
    with kvpatch.patched(model, "h2o", 1.0):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert all(map(torch.equal, want, run(twin)))
    kvpatch.unpatch(twin)
    assert all(map(torch.equal, want, run(twin)))


def test_a_shallow_copy_is_unpatched_with_its_model():
    model, ids, given = make("llama_gqa"), prompt(1, 20), {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    want = model.generate(ids, **given)
    with kvpatch.patched(model, "streaming_llm", 12):
        twin, other = copy.copy(model), model.generate(ids, **given)
        assert torch.equal(twin.generate(ids, **given), other) and not torch.equal(other, want)
    assert torch.equal(twin.generate(ids, **given), want)
    kvpatch.unpatch(twin)
    with kvpatch.patched(twin, "streaming_llm", 12):
        assert torch.equal(twin.generate(ids, **given), other)
    assert torch.equal(twin.generate(ids, **given), want)


def test_the_patch_is_freed_after_the_block():
    model = make("llama")
    with kvpatch.patched(model, "h2o", 0.3) as handle:
        model.generate(prompt(1, 10), max_new_tokens=2, do_sample=False, pad_token_id=0)
        watch = weakref.ref(handle)
    del handle
    gc.collect()
    assert watch() is None


def test_peft_lora_and_accelerate_hooks():
    ids, fed = prompt(1, 20), prompt(1, 5, seed=2)
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 0.5):
        want, _ = force(model, ids, fed)
    hooked = cpu_offload(make("llama_gqa"), execution_device=torch.device("cpu"))
    before = snapshot(hooked)
    with kvpatch.patched(hooked, "h2o", 0.5):
        got, cache = force(hooked, ids, fed)
    assert snapshot(hooked) == before
    torch.testing.assert_close(want, got)
    assert cache.held(0).tolist() == [[10, 10]]
    remove_hook_from_submodules(hooked)

    wrapped = get_peft_model(make("llama_gqa"), LoraConfig(target_modules=["q_proj", "v_proj"]))
    with kvpatch.patched(wrapped, "h2o", 0.5) as handle:
        out = wrapped.generate(input_ids=ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
        assert handle.report().held().tolist() == [[[10, 10]]] * 2
    assert out.shape == (1, 25)
    prefix = get_peft_model(make("llama_gqa"), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(kvpatch.KVPatchError, match="prefix tuning"), kvpatch.patched(prefix, "h2o", 0.5):
        pass


def test_threads_share_a_patched_model():
    model = make("llama_gqa")
    texts = [prompt(1, n, seed=n) for n in (17, 23, 31, 40)]

    def run(ids):
        return model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)

    with kvpatch.patched(model, "keyformer", 0.4):
        want = [run(ids) for ids in texts]
        got = [None] * len(texts)
        threads = [threading.Thread(target=lambda i=i: got.__setitem__(i, run(texts[i]))) for i in range(len(texts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_autocast_keeps_one_dtype_in_the_cache():
    model, ids, fed = make("llama_gqa"), prompt(1, 20), prompt(1, 5, seed=2)
    with kvpatch.patched(model, "h2o", 0.5), torch.autocast("cpu", torch.bfloat16):
        logits, cache = force(model, ids, fed)
    assert cache.layers[0].keys.dtype == cache.layers[0].values.dtype == torch.bfloat16
    assert torch.isfinite(logits).all()
