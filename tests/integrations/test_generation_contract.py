"""generate() is called in many ways, and what surrounds it stays as it was: signatures, configurations, warnings, errors."""

import copy
import functools
import inspect
import logging

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, GenerationMixin, LlamaForCausalLM
from transformers.utils import logging as hf_logging

import kvpatch
from tests.helpers.tiny import FIVE, make, prompt
from tests.integrations import generation_contract
from tools.reliability import upstream_tests

OPTIONS = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


@pytest.mark.parametrize("name", FIVE)
@pytest.mark.parametrize("share", [None, 1.0], ids=["unpatched", "patched"])
def test_the_contract_holds(name, share):
    """tests/integrations/generation_contract.py, as tools/reliability/upstream_tests.py runs transformers' own tests."""
    plugin = upstream_tests.Patching("h2o", share or 1.0)
    if share:
        plugin.install()
    try:
        for test, check in list(vars(generation_contract).items()):
            if not test.startswith("test_"):
                continue
            for mode in generation_contract.MODES if "mode" in inspect.signature(check).parameters else (None,):
                try:
                    check(make(name), **({} if mode is None else {"mode": mode}))
                    assert bool(plugin.live) == bool(share), f"{test} ran as it should"
                except pytest.skip.Exception:
                    continue
                finally:
                    plugin.release()
    finally:
        plugin.classes.undo()
    assert not share or sum(plugin.patched.values()) >= 15


def test_the_plugin_is_gone_afterwards():
    """It patches when called, says what it left alone, and is gone afterwards."""
    plugin, model = upstream_tests.Patching("h2o", 0.5), make("llama")
    plugin.install()
    try:
        out = model(prompt(1, 20))
        assert out.past_key_values.held(0).unique().tolist() == [10]
        kept = model.generate(prompt(1, 20), return_dict_in_generate=True, **OPTIONS).past_key_values
        assert kept.held(0).unique().tolist() == [10]
        plugin.release()
        assert not upstream_tests._is_patched(model)
        model.generate(prompt(1, 20), **OPTIONS)
        assert len(plugin.live) == 1, "a call of generate() patches it, too"
    finally:
        plugin.release()
        plugin.classes.undo()
    assert type(model(prompt(1, 5)).past_key_values) is DynamicCache
    assert GenerationMixin.generate.__module__ == "transformers.generation.utils"


def dicts(model, ids, run=None, **options):
    options = {"return_dict_in_generate": True, "output_logits": True, **OPTIONS, **options}
    out = (run or model.generate)(ids, **options)
    return out.sequences, torch.stack(out.logits, 1), out.past_key_values


def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
    return GenerationMixin._sample(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)


CALLERS = {
    "of the class": lambda model: functools.partial(type(model).generate, model),
    "of the mixin": lambda model: functools.partial(GenerationMixin.generate, model),
    "partial": lambda model: functools.partial(model.generate, use_cache=True),
    "custom": lambda model: functools.partial(model.generate, custom_generate=loop),
    "custom, of the class": lambda model: functools.partial(type(model).generate, model, custom_generate=loop),
}


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("name", FIVE)
def test_however_it_is_called_it_evicts(name, caller):
    model, ids = make(name), prompt(2, 24)
    for policy in ("keyformer", "snapkv"):
        with kvpatch.patched(model, policy, 0.5, **({"window": 4} if policy == "snapkv" else {})) as patch:
            want = dicts(model, ids)
            got = dicts(model, ids, CALLERS[caller](model))
            assert torch.equal(want[1], got[1])
            assert torch.equal(want[2].positions(1), got[2].positions(1))
            held, cache = want[2].held(1), got[2]
            del got, want
            CALLERS[caller](model)(ids, **OPTIONS)
            assert torch.equal(patch.report().held()[1], held), "the report knows of it"
            assert cache.plans.prompt_len is cache.plans.new_tokens is None


@pytest.mark.parametrize("kind", ["beams", "assisted", "chunks", "sampled"])
def test_a_call_of_the_class_in_every_mode(kind):
    model, ids = make("llama_gqa"), prompt(1, 24)
    options = {
        "beams": {"num_beams": 3}, "assisted": {"assistant_model": make("llama", layers=1, seed=3)},
        "chunks": {"prefill_chunk_size": 5}, "sampled": {"do_sample": True, "num_return_sequences": 2},
    }[kind]  # fmt: skip
    with kvpatch.patched(model, "h2o", 0.5):
        torch.manual_seed(0)
        want = dicts(model, ids, **options)
        torch.manual_seed(0)
        got = dicts(model, ids, functools.partial(type(model).generate, model), **options)
    assert torch.equal(want[1], got[1])
    assert got[2].held(0).unique().tolist() == [12]


class OwnArguments(LlamaForCausalLM):
    def generate(self, text, count):
        return super().generate(text, max_new_tokens=count, do_sample=False, pad_token_id=0)


class Wrapper:
    """A server's object that passes all on to a model."""

    def __init__(self, model):
        self.inner = model

    def __getattr__(self, name):
        return getattr(self.inner, name)


def test_a_generate_of_the_user_s_own():
    model, ids = make("llama_gqa"), prompt(1, 24)
    want = model.generate(ids, **OPTIONS)
    with kvpatch.patched(model, "h2o", 0.5):
        evicted = model.generate(ids, **OPTIONS)
        assert torch.equal(Wrapper(model).generate(ids, **OPTIONS), evicted)
    model.__class__ = OwnArguments
    assert torch.equal(model.generate(ids, 6), want)
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        assert torch.equal(model.generate(ids, 6), evicted)
        assert patch.report().held().unique().tolist() == [12]


def test_a_folder_of_custom_generate(tmp_path):
    folder = tmp_path / "custom_generate"
    folder.mkdir()
    (folder / "generate.py").write_text(
        "def generate(model, inputs, max_new_tokens, **kwargs):\n"
        "    assert not {'past_key_values', 'use_cache'} & set(kwargs), kwargs\n"
        "    return model.generate(inputs, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0)\n"
    )
    model, ids = make("llama_gqa"), prompt(1, 24)
    given = {"max_new_tokens": 6, "custom_generate": str(tmp_path), "trust_remote_code": True}
    want = model.generate(ids, **given)
    with kvpatch.patched(model, "h2o", 1.0):
        assert torch.equal(model.generate(ids, **given), want)
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        assert model.generate(ids, **given).shape == (1, 30)
        assert patch.report().held().unique().tolist() == [12]


def warned(model, ids, calls):
    """What transformers logs, and how often."""
    records, handler = [], logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    hf_logging.set_verbosity_warning()
    try:
        for call in calls:
            hf_logging.warning_once.cache_clear()
            model.generate(ids, **copy.deepcopy(call))
    finally:
        hf_logging.set_verbosity_error()
        logger.removeHandler(handler)
    return records


@pytest.mark.parametrize("name", FIVE)
def test_warnings_are_the_same_in_number_and_words(name):
    model, ids = make(name), prompt(2, 12)
    config = GenerationConfig(max_new_tokens=2, pad_token_id=0, do_sample=False)
    calls = [
        {"generation_config": config}, {"generation_config": config, "max_new_tokens": 3},
        {"max_new_tokens": 2, "do_sample": False, "temperature": 0.4}, {"max_new_tokens": 2, "max_length": 14},
        {"generation_config": config, "cache_implementation": "hybrid"},
    ]  # fmt: skip
    want = warned(model, ids, calls)
    assert len(want) >= 4
    for k in (1.0, 0.5):
        with kvpatch.patched(model, "h2o", k):
            assert warned(model, ids, calls) == want


def test_what_is_refused():
    model, ids = make("llama_gqa"), prompt(1, 24)
    with kvpatch.patched(model, "h2o", 0.5):
        static = GenerationConfig(max_new_tokens=2, cache_implementation="static")
        for run in (model.generate, functools.partial(type(model).generate, model)):
            with pytest.raises(kvpatch.KVPatchError, match="cache_implementation='static' asks for another cache"):
                run(ids, static)
            with pytest.raises(kvpatch.KVPatchError, match="An empty DynamicCache"):
                run(ids, past_key_values=DynamicCache(), **OPTIONS)
            with pytest.raises(kvpatch.KVPatchError, match="output_attentions=True"):
                run(ids, output_attentions=True, return_dict_in_generate=True, **OPTIONS)
        for moved, words in (({"penalty_alpha": 0.6, "top_k": 4}, "Contrastive"), ({"dola_layers": "low"}, "Dola")):
            with pytest.raises(ValueError, match=f"{words}.*requires `trust_remote_code=True`"):
                model.generate(ids, **moved, **OPTIONS)
        assert model.generate(ids, **OPTIONS).shape == (1, 30), "and the next call works"
    with kvpatch.patched(model, "h2o", 1.0):
        manager = model.init_continuous_batching()
        assert "generate_batch" not in vars(model) and type(manager).__module__.startswith("transformers"), "nothing is evicted"


def test_mpt_whose_configuration_says_no_cache_warns_no_more_than_before():
    model, ids = make("mpt"), prompt(1, 24)
    model.config.use_cache = model.generation_config.use_cache = False
    call = [{"generation_config": GenerationConfig(max_new_tokens=2, pad_token_id=0, do_sample=False)}]
    want = warned(model, ids, call)
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        assert warned(model, ids, call) == want
        assert patch.report().held().unique().tolist() == [12]
