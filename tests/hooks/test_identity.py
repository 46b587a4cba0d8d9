"""What has been read goes on with the model that read it: other weights, another adapter, another model are noticed."""

import copy
import io
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model

import kvpatch
from kvpatch import KVPatchError
from kvpatch.cache.cache import EvictingCache
from kvpatch.hooks.identity import stamp_model
from kvpatch.hooks.target import Target
from tests.helpers.marks import batches
from tests.helpers.serving import batched, prompts, running
from tests.helpers.tiny import make, prompt

DOCUMENT = prompt(1, 40)
WHOLE = torch.cat([DOCUMENT, prompt(1, 7, seed=3)], 1)
OPTIONS = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def adapted(seed=0, targets=("q_proj", "k_proj", "v_proj")):
    """A model with the adapters "one", which acts, and "two"."""
    torch.manual_seed(seed)
    config = LoraConfig(target_modules=list(targets), r=4, lora_alpha=64, init_lora_weights=False)
    model = get_peft_model(make("llama_gqa"), config, adapter_name="one")
    model.add_adapter("two", LoraConfig(target_modules=list(targets), r=4, lora_alpha=64, init_lora_weights=False))
    return model.eval()


def filled(patch, model, ids=DOCUMENT, **options):
    cache = patch.new_cache()
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, **options)
    return cache


def answer(model, past=None, ids=WHOLE, **options):
    return model.generate(input_ids=ids, past_key_values=past, **OPTIONS | options).tolist()


def step(model, **options):
    model.zero_grad()
    model(input_ids=DOCUMENT, labels=DOCUMENT).loss.backward()
    torch.optim.AdamW(model.parameters(), lr=0.1, **options).step()
    model.zero_grad()


def load_anew(model):
    other = make("llama_gqa", seed=5).state_dict()
    model.load_state_dict(other)


def load_assigned(model):
    model.load_state_dict(make("llama_gqa", seed=5).state_dict(), assign=True)


def copy_data(model):
    for mine, other in zip(model.parameters(), make("llama_gqa", seed=5).parameters(), strict=True):
        mine.data.copy_(other.data)


def change_one_number(model):
    with torch.no_grad():
        next(model.model.layers[1].mlp.parameters())[-1, -1] += 1


CHANGES = {
    "load_state_dict": load_anew,
    "load_state_dict, assigned": load_assigned,
    "param.data.copy_": copy_data,
    "one number of one weight": change_one_number,
    "a step": step,
    "a fused step, which torch does not count": lambda model: step(model, fused=True),
    "a step for each": lambda model: step(model, foreach=True),
    "half": lambda model: model.bfloat16(),
}


@pytest.mark.parametrize("what", CHANGES)
def test_changed_weights(what):
    """A prefix is read anew, and continuing a cache or a prefix at hand is refused; a new cache goes on."""
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 20) as patch:
        cache, prefix = filled(patch, model), patch.prefix(DOCUMENT)
        answer(model, cache.clone()), answer(model, prefix)
        CHANGES[what](model)
        words = "Another model has read this {}, or this model has changed since.*Read the text by this one, with {}"
        for past in (cache, cache.clone(), cache.select_rows(0)):
            with pytest.raises(KVPatchError, match=words.format("cache", r"a cache of patch\.new_cache\(\)")):
                answer(model, past)
        with pytest.raises(KVPatchError, match=words.format("prefix", r"patch\.prefix\(ids\)")):
            answer(model, prefix)
        with pytest.raises(KVPatchError, match="Another model has read this cache"), torch.no_grad():
            model(WHOLE[:, 40:], past_key_values=cache)
        with pytest.raises(KVPatchError, match="Another model has read this cache"):
            patch.save_cache(cache, "never.safetensors")
        assert patch.prefix(DOCUMENT) is not prefix and len(patch.prefixes) == 1
        assert patch.prefix(DOCUMENT) is patch.prefix(DOCUMENT)
        assert answer(model, patch.prefix(DOCUMENT)) == answer(model, filled(patch, model))
        cache.reset()
        assert answer(model, cache) == answer(model)


ADAPTERS = {
    "another adapter": lambda model: model.set_adapter("two"),
    "two adapters": lambda model: model.base_model.set_adapter(["one", "two"]),
    "none": lambda model: model.base_model.disable_adapter_layers(),
    "merged": lambda model: model.merge_adapter(["one"]),
    "scaled": lambda model: [module.set_scale("one", 0.25) for module in model.modules() if hasattr(module, "set_scale")],
    "trained": step,
}


@pytest.mark.parametrize("what", ADAPTERS)
def test_changed_adapters(what, tmp_path):
    """In the block, and under a later one; files, too."""
    model, path = adapted(), tmp_path / "cache.safetensors"
    with kvpatch.patched(model, "h2o", 20) as patch:
        cache, prefix = filled(patch, model), patch.prefix(DOCUMENT)
        before = answer(model, cache.clone())
        patch.save_cache(cache, path)
        ADAPTERS[what](model)
        with pytest.raises(KVPatchError, match="Another model has read this cache"):
            answer(model, cache)
        if what not in ("scaled",):
            with pytest.raises(KVPatchError, match="was saved under another model: (adapters|weights) is"):
                patch.load_cache(path)
        after = answer(model, filled(patch, model))
        assert answer(model, patch.prefix(DOCUMENT)) == after and (after == before) is (what == "merged")
    with kvpatch.patched(model, "h2o", 20), pytest.raises(KVPatchError, match="Another model has read this prefix"):
        answer(model, prefix)


def test_the_words_name_adapters_and_they_may_come_back():
    model = adapted()
    with kvpatch.patched(model, "h2o", 20) as patch:
        cache = filled(patch, model)
        want = answer(model, cache.clone())
        model.set_adapter("two")
        with pytest.raises(KVPatchError, match="adapter is 'one' there and 'two' here"):
            answer(model, cache)
        with model.disable_adapter(), pytest.raises(KVPatchError, match="adapter is 'one' there and 'none' here"):
            answer(model, cache)
        model.set_adapter("one")
        assert answer(model, cache) == want


def test_another_model_of_the_same_shapes():
    """A cache object of it is refused; a copy of the same weights goes on with it."""
    model, other = make("llama_gqa"), make("llama_gqa", seed=4)
    twin = copy.deepcopy(model)
    with kvpatch.patched(model, "h2o", 20) as patch:
        cache = filled(patch, model)
        want = answer(model, cache.clone())
    for one in (other, twin):
        with kvpatch.patched(one, "h2o", 20) as patch:
            if one is twin:
                assert answer(one, cache.clone()) == want
                continue
            with pytest.raises(KVPatchError, match="weights is 'as they were' there and \"another model's\" here"):
                answer(one, cache.clone())
            with pytest.raises(KVPatchError, match="read by another model than cache 0"):
                EvictingCache.concatenate([filled(patch, one), cache])


@batches
def test_prefixes_of_continuous_batching_are_read_anew():
    """By generate_batch(), and by a manager that runs while weights change between its requests."""
    from tests.helpers.serving import collect

    model, (document, rest) = make("llama_gqa"), prompts((70, 11), seed=2)
    ids = document + rest
    with kvpatch.patched(model, "h2o", 24) as patch:
        patch.prefix(document)
        before = batched(model, [ids])
        load_anew(model)
        after = batched(model, [ids])
        given = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        past = filled(patch, model, torch.tensor([document]))
        want = model.generate(torch.tensor([ids]), past_key_values=past, **given)[0, len(ids) :].tolist()
        assert after == [want] != before
        with running(model) as manager:
            first = collect(manager, [name := manager.add_request(ids)])[name].generated_tokens
            with torch.no_grad():
                model.model.layers[0].mlp.down_proj.weight.mul_(-1.5)
            second = collect(manager, [name := manager.add_request(ids)])[name].generated_tokens
        assert first == want and [second] == batched(model, [ids]) != [first]


def test_a_calibration_under_another_adapter():
    from kvpatch.evaluation.calibrate import calibrate

    model = adapted()
    calibration = calibrate(model, [prompt(1, 60)])
    with kvpatch.patched(model, "q_filter", 20, calibration=calibration):
        want = answer(model)
        model.set_adapter("two")
        with pytest.raises(KVPatchError, match="calibration= .*adapter is 'one' there and 'two' here.*kvpatch calibrate"):
            answer(model)
        model.set_adapter("one")
        assert answer(model) == want
    model.set_adapter("two")
    with pytest.raises(KVPatchError, match="calibration= is of another model: adapters is 'one' there and 'two' here"):
        kvpatch.patched(model, "q_filter", 20, calibration=calibration)


def test_rows_with_adapters_of_their_own():
    """PEFT's adapter_names: rows go on with their own, and with no other."""
    model, texts = adapted(), prompt(2, 30)
    longer = torch.cat([texts, prompt(2, 5, seed=6)], 1)
    with kvpatch.patched(model, "h2o", 20) as patch, torch.no_grad():
        cache = patch.new_cache()
        out = model.generate(input_ids=texts, past_key_values=cache, adapter_names=["one", "two"], **OPTIONS)
        longer = torch.cat([out, longer[:, 30:]], 1)
        want = answer(model, cache.clone(), longer, adapter_names=["one", "two"])
        with pytest.raises(KVPatchError, match="adapter is 'one' there and 'two' here"):
            answer(model, cache.clone(), longer, adapter_names=["two", "one"])
        with pytest.raises(KVPatchError, match="adapter is 'two' there and 'one' here"):
            answer(model, cache.clone(), longer)
        turned = cache.clone()
        turned.reorder_cache(torch.tensor([1, 0]))
        assert answer(model, turned, longer[[1, 0]], adapter_names=["two", "one"]) == want[::-1]
        second = cache.select_rows(1)
        model.set_adapter("two")
        assert answer(model, second, longer[1:]) == want[1:]


@pytest.mark.parametrize("mixed", [True, False], ids=["adapter_names", "set_adapter"])
def test_joined_rows_have_the_adapters_that_read_them(mixed):
    model, texts = adapted(), [prompt(1, 30, seed=seed) for seed in range(4)]
    names = ["one", "two", "one", "two"]
    with kvpatch.patched(model, "h2o", 20) as patch, torch.no_grad():
        if mixed:
            caches = [filled(patch, model, torch.cat(texts[i : i + 2]), adapter_names=names[:2]) for i in (0, 2)]
        else:
            caches = []
            for text, name in zip(texts, names, strict=True):
                model.set_adapter(name)
                caches.append(filled(patch, model, text))
        joined = EvictingCache.concatenate(caches)
        assert joined.model_stamp.adapters == tuple(names)
        for row, name in enumerate(names):
            model.set_adapter(name)
            whole = torch.cat([texts[row], prompt(1, 5, seed=9)], 1)
            assert answer(model, joined.select_rows(row), whole) == answer(model, filled(patch, model, texts[row]), whole)


WEIGHING = ["critical_snapkv", "critical_adakv", "kvzip_plus", "layer_defensive", "defensive_snapkv"]


@pytest.mark.parametrize("policy", WEIGHING)
def test_mixed_batches_under_policies_that_weigh_values(policy):
    model, text = adapted(targets=("q_proj", "o_proj")), prompt(1, 60).repeat(2, 1)
    with kvpatch.patched(model, policy, 40):
        with pytest.raises(KVPatchError, match=f"Policy '{policy}' weighs values by the output projection.*set_adapter.*use"):
            answer(model, None, text, adapter_names=["one", "two"])
        alone = answer(model, None, text[:1])
        assert answer(model, None, text[:1], adapter_names=["one"]) == alone
    other = adapted()
    with kvpatch.patched(other, policy, 40):
        both = answer(other, None, text, adapter_names=["one", "two"])
        assert both[:1] == answer(other, None, text[:1]), "the projection is everybody's"


@pytest.mark.parametrize("call", ["forward", "generate"])
@pytest.mark.parametrize("given", ["adapter_names", "alora_offsets"])
def test_a_refused_call_leaves_no_hooks_of_adapters(given, call):
    """PEFT hands these to its layers by hooks, which it leaves there after an error."""
    model, text = adapted(targets=("q_proj", "o_proj")), prompt(1, 60).repeat(2, 1)
    if given == "alora_offsets":
        acting = {"alora_invocation_tokens": text[0, -3:].tolist(), "task_type": "CAUSAL_LM"}
        model = get_peft_model(make("llama_gqa"), LoraConfig(target_modules=["q_proj"], r=4, **acting)).eval()
    names = {"adapter_names": ["one", "two"]} if given == "adapter_names" else {}
    with kvpatch.patched(model, "critical_snapkv", 40):
        before = [(name, list(module._forward_pre_hooks)) for name, module in model.named_modules()]
        with pytest.raises(KVPatchError, match=r"output projection|output_attentions=True"):
            if call == "forward":
                model(input_ids=text, output_attentions=True, **names)
            else:
                answer(model, None, text, output_attentions=True, return_dict_in_generate=True, **names)
        assert [(name, list(module._forward_pre_hooks)) for name, module in model.named_modules()] == before


def test_records_outlive_a_change_of_weights():
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 20, record=True) as patch:
        cache = patch.new_cache()
        texts = model.generate(DOCUMENT, past_key_values=cache, **OPTIONS)
        step(model)
        record = patch.record(cache)
    with kvpatch.replay(model, record):
        model(texts, labels=texts).loss.backward()


def test_at_everything_a_cache_goes_on_as_unpatched():
    model = make("llama_gqa")
    with torch.no_grad():
        past = model(DOCUMENT).past_key_values
    with kvpatch.patched(model, "h2o", 1.0) as patch:
        cache = filled(patch, model)
        load_anew(model)
        assert answer(model, cache) == answer(model, past)


def test_moving_training_mode_and_tied_weights_change_nothing():
    model = make("llama_gqa")
    model.tie_weights()
    with kvpatch.patched(model, "h2o", 20) as patch:
        cache, before = filled(patch, model), stamp_model(model.model)
        model.train(), model.eval(), model.requires_grad_(False), model.double().float(), model.tie_weights()
        assert before.differs(stamp_model(model.model)) is None
        answer(model, cache)


def test_models_made_in_inference_mode():
    with torch.inference_mode():
        model = make("llama_gqa")
        with kvpatch.patched(model, "h2o", 20) as patch:
            cache = filled(patch, model)
            answer(model, cache.clone())
            next(model.model.layers[0].parameters()).mul_(2)
            with pytest.raises(KVPatchError, match="weights is 'as they were' there and 'changed since' here"):
                answer(model, cache)


def test_identity_of_files_stays_what_it_was_without_adapters():
    assert list(Target.find(make("llama_gqa")).identity()) == ["class", "layers", "KV heads", "head size", "dtype", "weights"]


def test_pickle_is_refused_in_words():
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 20) as patch:
        cache, prefix = filled(patch, model), patch.prefix(DOCUMENT)
        for one in (cache, prefix, cache.layers[0], [cache]):
            for save in (lambda one: torch.save(one, io.BytesIO()), pickle.dumps, lambda one: pickle.dumps(one, 2)):
                with pytest.raises(KVPatchError, match=r"cannot be pickled.*patch\.save_cache\(cache, path\)"):
                    save(one)
        want = answer(model, cache.clone())
        for own in (copy.deepcopy(cache), copy.deepcopy([cache])[0], copy.deepcopy(prefix), prefix.copy()):
            assert answer(model, own) == want
        assert answer(model, cache) == want, "copies are independent"
        layer = copy.deepcopy(filled(patch, model).layers[0])
        assert layer.positions.shape[2] >= 20
