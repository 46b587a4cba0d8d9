"""Invariants 2 and 9: after the block the model is as before; training inside it is training outside it."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_submodules
from peft import LoraConfig, PrefixTuningConfig, get_peft_model

import kvpatch
from kvpatch.arch.bound import Site
from kvpatch.arch.llama import LlamaAdapter
from tests.helpers.tiny import FIVE, force, make, prompt, snapshot


def step(model, ids):
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", FIVE)
def test_after_the_block_the_model_is_as_before(name):
    model, ids = make(name), prompt(2, 20)
    before, logits = snapshot(model), model(ids).logits
    keys = set(vars(model))
    with kvpatch.patched(model, "h2o", 0.3):
        assert snapshot(model) != before
        model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert snapshot(model) == before
    assert set(vars(model)) == keys
    assert torch.equal(model(ids).logits, logits)


def test_an_error_inside_the_block_restores_the_model_too():
    model, ids = make("llama"), prompt(1, 20)
    before = snapshot(model)
    with pytest.raises(ZeroDivisionError), kvpatch.patched(model, "h2o", 0.3):
        model(ids)
        raise ZeroDivisionError
    assert snapshot(model) == before


def test_a_failed_installation_leaves_nothing_behind(monkeypatch):
    model = make("llama")
    before = snapshot(model)
    monkeypatch.setattr(kvpatch.patching, "wrap_generate", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        kvpatch.patch(model, "h2o", 0.3)
    assert snapshot(model) == before


def test_a_foreign_patch_is_restored_and_remove_works_twice():
    model, ids = make("llama"), prompt(1, 20)
    attention = model.model.layers[0].self_attn
    calls = []
    original = attention.forward

    def foreign(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    attention.forward = foreign
    handle = kvpatch.patch(model, "h2o", 0.3)
    model(ids)
    assert not calls, "with a cache, attention is kvpatch's"
    model(ids, use_cache=False)
    assert calls, "without one it is what stood there before"
    handle.remove()
    handle.remove()
    assert attention.forward is foreign


@pytest.mark.parametrize("name", FIVE)
def test_a_training_step_is_bit_for_bit_the_same(name):
    model, ids = make(name).train(), prompt(2, 24)
    torch.manual_seed(3)
    loss, grads = step(model, ids)
    with kvpatch.patched(model, "keyformer", 0.2):
        torch.manual_seed(3)
        loss_inside, grads_inside = step(model, ids)
    assert torch.equal(loss, loss_inside)
    assert grads.keys() == grads_inside.keys()
    assert all(torch.equal(grads[name], grads_inside[name]) for name in grads)


def test_gradient_checkpointing_and_cacheless_forwards_are_untouched():
    model, ids = make("llama").train(), prompt(2, 24)
    model.gradient_checkpointing_enable()
    loss, grads = step(model, ids)
    with kvpatch.patched(model, "h2o", 0.2):
        loss_inside, grads_inside = step(model, ids)
        model.eval()
        with torch.no_grad():
            inside = model(ids, use_cache=False)
    assert torch.equal(loss, loss_inside)
    assert all(torch.equal(grads[name], grads_inside[name]) for name in grads)
    assert inside.past_key_values is None
    with torch.no_grad():
        assert torch.equal(inside.logits, model(ids, use_cache=False).logits)


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


@pytest.mark.parametrize("name", FIVE)
def test_gradients_flow_through_a_prompt_with_a_cache(name):
    model, ids = make(name, dtype=torch.float64), prompt(2, 24)
    _, grads = step(model, ids)
    with kvpatch.patched(model, "roco", 0.3):
        _, inside = step(model, ids)
    for key in grads:
        torch.testing.assert_close(grads[key], inside[key], atol=1e-5, rtol=1e-4)


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


@pytest.mark.parametrize("base", ["h2o", "snapkv", "adaptive(roco)", "keyformer", "key_norm"])
def test_scores_norms_and_statistics_are_float32_under_autocast(base, monkeypatch):
    """What is attended is what autocast made of it; all that is made of it is as it is without autocast."""
    model, ids, fed = make("llama_gqa"), prompt(2, 40), prompt(2, 5, seed=2)
    policy = kvpatch.get_policy(base if base == "key_norm" else f"critical({base})")
    attend, calls = kvpatch.hooks.attend_untraced, []

    def noting(cache, layer, q, k, v, site):
        calls.append((layer, q, k, v))
        return attend(cache, layer, q, k, v, site)

    def replaying(cache, layer, q, k, v, site):
        index, *noted = calls.pop(0)
        assert index == layer
        noted = [part.to(noted[-1].dtype) for part in noted]  # the cache's own
        return attend(cache, layer, *noted, site)

    def run(at_attention):
        with monkeypatch.context() as patched:
            patched.setattr(kvpatch.hooks.attention, "attend_untraced", at_attention)
            with kvpatch.patched(model, policy, 0.4):
                _, cache = force(model, ids, fed)
        return cache.layers

    with torch.autocast("cpu", torch.bfloat16):
        mixed = run(noting)
    plain = run(replaying)
    assert not calls
    for one, other in zip(mixed, plain, strict=True):
        assert one.keys.dtype == torch.bfloat16 and one.state.keys() == other.state.keys()
        assert torch.equal(one.positions, other.positions)
        for name, tensor in one.state.items():
            assert tensor.dtype == torch.float32 or name == "protect"
            assert torch.equal(tensor, other.state[name]), name


def test_autocast_and_a_projection_that_is_asked():
    """A LoRA's weights are float32 and its values half: it is asked as it runs."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, target_modules=["o_proj"], init_lora_weights=False)
    model, ids, fed = make("llama_gqa"), prompt(2, 40), prompt(2, 5, seed=2)
    torch.manual_seed(0)
    wrapped = get_peft_model(model, config).eval()
    with kvpatch.patched(wrapped, "critical(h2o)", 0.4), torch.autocast("cpu", torch.bfloat16):
        logits, cache = force(wrapped, ids, fed)
    assert torch.isfinite(logits).all() and cache.layers[0].output_rows is not None


def test_two_stage_selection_sees_the_projection_that_runs():
    """A LoRA on the output projection, or an offloaded one, has no plain weight: it is asked for its rows."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module
    from peft import LoraConfig, get_peft_model

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
    values, site = torch.zeros(1, 2, 1, 8), Site(LlamaAdapter(), attn, 2)
    rows, worked_out = site.output_rows(values, 2)
    assert worked_out
    wrapped.train()
    assert torch.equal(rows, site.output_rows(values, 2)[0]), "LoRA's dropout is no part of the weight"
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
