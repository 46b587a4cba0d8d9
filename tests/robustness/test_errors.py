"""Bad input: the class and the words of each error, before the model is touched."""

import inspect
import re

import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5Model,
    ViTConfig,
    ViTModel,
)
from transformers.cache_utils import StaticCache

import kvpatch
from kvpatch import KVPatchError
from kvpatch.policies import POLICIES
from kvpatch.storage.settings import OF_PATCH
from tests.helpers.tiny import IDS, VOCAB, left_pad, make, prompt, snapshot

NAN = float("nan")
# of keyformer, where no policy is named
ARGUMENTS = [
    ({"k": 0}, r"k=0 tokens keeps nothing: it must be at least 1.*share of the prompt such as k=0\.5"),
    ({"k": 0.0}, r"k=0\.0 is not a share in \(0, 1\]"),
    ({"k": 1.5}, r"k=1\.5 is not a share in \(0, 1\].*number of tokens such as k=1024"),
    ({"k": True}, r"k=True is not a budget"),
    ({"k": "lots"}, r"k='lots' is not a size \(a number and one of B, KB"),
    ({"k": "0GiB"}, r"k='0GiB' is not a size"),
    ({"k": "3B"}, r"k='3B' holds no token: one token of this model takes 256 bytes"),
    ({"k": [0.5]}, r"k has 1 entries, but the model has 2 layers: give one for each"),
    ({"k": [0.5, -1]}, r"k\[1\]=-1 tokens keeps nothing"),
    ({"bits": 2}, r"bits=2 must be 16 \(keys and values in the model's own precision\), 8 or 4 \(rounded"),
    ({"bits": "8"}, r"bits='8' must be 16"),
    ({"bits": "auto"}, r"bits='auto' must be 16.*kvpatch compare MODEL FILE -k SIZE --bits auto"),
    ({"k": "100B", "bits": 8}, r"k='100B' holds no token: one token of this model takes 128 bytes"),
    ({"policy": "h20"}, r"Unknown policy 'h20'\. Did you mean 'h2o'\? Known: full, random"),
    ({"policy": "Snap-KW"}, r"Unknown policy 'Snap-KW'\. Did you mean 'snapkv'\?"),
    ({"policy": "refti(kvzip)"}, r"Unknown policy 'refti\(kvzip\)'\. Did you mean 'refit\(kvzip\)'\? Known: full, random"),
    ({"policy": "critcal( adaptve(rocko))"}, r"Did you mean 'critical\(adaptive\(roco\)\)'\?"),
    ({"policy": "refit(kvzp)"}, r"Unknown policy 'kvzp'\. Did you mean 'kvzip'\?"),
    ({"policy": "sorted(kvzip)"}, r"Unknown policy 'sorted\(kvzip\)'\. Known: full, random"),
    ({"policy": "adakv", "floor": 1.5}, r"floor=1\.5 must be a share of the uniform budget, in \[0, 1\]"),
    ({"policy": "pyramidkv", "beta": 0.5}, r"beta=0\.5 must be a number of at least 1: the last layer gets budget / beta"),
    ({"policy": "pyramidkv", "k": [0.5, 0.2]}, r"k is a list, but policy 'pyramidkv' divides one budget over the layers"),
    ({"policy": "critical_snapkv", "alpha": 2}, r"alpha=2 must be a number in \[0, 1\]"),
    ({"policy": "compactor", "blend": -1}, r"blend=-1 must be a number, 0 or more"),
    ({"policy": "compactor", "chunk": 0}, r"chunk=0 must be"),
    ({"policy": "merged(h2o)", "threshold": 2}, r"threshold=2 must be a cosine in \[0, 1\]"),
    ({"policy": "merged(h2o)", "schedule": "both"}, r"merges what a prompt's end evicts, .*; use schedule='prompt'"),
    ({"policy": "refit(h2o)", "schedule": "both"}, r"refits values where a prompt ends, .*; use schedule='prompt'"),
    ({"policy": "refit(raas)"}, r"raas.*schedule"),
    ({"policy": "refit(full)"}, r"refit\('full'\): 'full' never evicts, so there is nothing to combine"),
    ({"policy": "refit(h2o)", "queries": 0}, r"queries=0 must be a number of tokens of a second reading"),
    ({"policy": "refit(h2o)", "block": 8}, r"block=8: policy 'refit_h2o' evicts after a second reading"),
    ({"policy": "refit(h2o)", "positions": "renumbered"}, r"policy 'refit_h2o', which reads a prompt a second time"),
    ({"policy": "refit(h2o)", "record": True}, r"record=True does not go with policy 'refit_h2o', which changes the values"),
    (
        {"policy": "refit(h2o)", "lossless": True},
        r"lossless=True chooses its budget anew.*'refit_h2o' reads the prompt a second",
    ),
    ({"policy": "critical_snapkv", "norm": 3}, r"norm=3 must be 1 or 2"),
    ({"policy": "critical_adakv", "schedule": "decode"}, r"schedule='decode': policy 'critical_adakv' scores the tokens"),
    ({"policy": "h2o", "turns": "each"}, r"turns='each' says what later prompts.*schedule='both' does not allow"),
    ({"policy": "snapkv", "turns": "last"}, r"turns='last' must be one of 'all', 'each', 'first'"),
    ({"policy": "h2o", "windw": 3}, r"Policy 'h2o' has no option 'windw'\. It has: scores, sinks, recent, protect"),
    ({"policy": "keyformer", "nois": "none"}, r"no option 'nois'\. Did you mean 'noise'\?"),
    ({"policy": "keyformer", "noise": "loud"}, r"noise='loud' must be 'gumbel', 'gaussian', 'constant' or 'none'"),
    ({"policy": "keyformer", "tau": 2.0}, r"tau=2\.0 must be two positive temperatures"),
    ({"policy": "keyformer", "damping": 2}, r"damping=2 must be in \[0, 1\]"),
    ({"policy": "keyformer", "generation_length": 0}, r"generation_length=0 must be a number of tokens"),
    ({"policy": "tova", "heads": "some"}, r"heads='some' must be 'layer'.*or 'each'"),
    ({"policy": "snapkv", "kernel": 4}, r"kernel=4 must be an odd number"),
    ({"policy": "snapkv", "window": 0}, r"window=0 must be a number of rows"),
    ({"policy": "snapkv", "pooling": "min"}, r"pooling='min' must be 'max', 'avg' or None"),
    ({"policy": "snapkv", "schedule": "both"}, r"schedule='both': policy 'snapkv' scores the tokens of a prompt"),
    ({"policy": "dilated_window", "dilation": -1}, r"dilation=-1 must be a whole number"),
    ({"policy": "roco", "protected": 1.5}, r"protected=1\.5 is more than the whole budget"),
    ({"policy": "h2o", "recent": "half"}, r"recent='half' must be"),
    ({"policy": "h2o", "sinks": 0.5}, r"sinks=0\.5 must be a number of tokens"),
    ({"policy": "h2o", "protect": [0.5]}, r"protect= has dtype torch\.float32"),
    ({"schedule": "always"}, r"schedule='always' must be one of 'prompt', 'decode', 'both'"),
    ({"block": 0}, r"block=0 must be a number of tokens, at least 1"),
    ({"block": 8, "schedule": "decode"}, r"block=8 evicts while the prompt is read, but schedule='decode' keeps the prompt"),
    ({"k": [1.0, 4], "shared": True}, r"k=\[1\.0, 4\]: with shared=True each layer adds to one score, but layer 0 keeps every"),
    ({"block": 8, "shared": True}, r"block=8: with shared=True a layer's choice needs the scores that later layers"),
    ({"positions": "new"}, r"positions='new' is unknown; use 'original' or 'renumbered'"),
    ({"backend": "flash"}, r"backend='flash' cannot run here"),
    ({"backend": "cuda"}, r"Unknown backend 'cuda'"),
    ({"seed": 1.5}, r"seed=1\.5 must be an int"),
]


@pytest.mark.parametrize(("arguments", "words"), ARGUMENTS, ids=[str(a) for a, _ in ARGUMENTS])
def test_bad_arguments(arguments, words):
    model = make("llama_gqa")
    before = snapshot(model)
    with pytest.raises(KVPatchError, match=words), kvpatch.patched(model, **{"policy": "keyformer", **arguments}):
        pass
    assert snapshot(model) == before


def test_patched_and_patch_take_the_same():
    one, other = (inspect.signature(function).parameters for function in (kvpatch.patched, kvpatch.patch))
    assert {name: (p.kind, p.default) for name, p in one.items()} == {name: (p.kind, p.default) for name, p in other.items()}
    others = ("record", "graphs", "auto", "lossless", "offload_folder")
    assert tuple(one) == ("model", "policy", "k", *OF_PATCH, *others, "policy_options")
    for name in one:
        assert re.search(rf"^ +\*{{0,2}}{name}: ", kvpatch.patched.__doc__, re.MULTILINE), f"{name} is not documented"


@pytest.mark.parametrize("name", ["policy", *OF_PATCH])
def test_a_misspelt_argument_gets_a_suggestion(name):
    for slip in (name[:-1], name.upper(), f"{name}s"):
        with pytest.raises(KVPatchError, match=rf"patched\(\) has no option '{slip}'\. Did you mean '{name}'\?"):
            kvpatch.patch(make("llama_gqa"), **{slip: None})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_sink_tokens": 4}, r"'num_sink_tokens': the first tokens, .* are sinks=, such as sinks=4\."),
        ({"heavy_ratio": 0.1, "recent_ratio": 0.1}, r"'heavy_ratio': k is the whole budget, .* are k=0\.2, recent=0\.5\."),
    ],
)
@pytest.mark.parametrize("policy", ["h2o", None])
def test_options_of_other_libraries(policy, options, words):
    with pytest.raises(KVPatchError, match=words):
        kvpatch.patch(make("llama_gqa"), policy, **options)


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({}, r"Score Mine has no method value, which returns a number for each cached token .* def value\(self, context\)"),
        ({"value": max, "note": max}, r"Mine\.note: scores and scopes say .* as needs: needs = \(LastUses"),
        ({"value": max, "fold": max}, r"Mine\.fold: .* needs = \(WindowAttention\(32, fold="),
    ],
)
def test_a_score_without_its_methods_is_refused_where_the_policy_is_made(declared, words):
    score = type("Mine", (kvpatch.Score,), declared)()
    with pytest.raises(KVPatchError, match=words):
        kvpatch.Policy("mine", score)


def test_combinations_that_make_no_sense():
    policies = kvpatch.policies
    for base in ("window", "streaming_llm", "dilated_window", "key_norm"):
        with pytest.raises(KVPatchError, match=rf"score of policy 'critical_{base}' is no weight: it may be negative"):
            policies.critical(base)
    with pytest.raises(KVPatchError, match=r"adaptive\('full'\): 'full' never evicts"):
        policies.adaptive("full")
    words = r"adaptive\('h2o'\): 'h2o' keeps the prompt whole \(schedule='decode'\)\. Give .*schedule='both'"
    with pytest.raises(KVPatchError, match=words):
        policies.adaptive(kvpatch.get_policy("h2o").with_options(schedule="decode"))
    with pytest.raises(KVPatchError, match=r"Unknown policy 'rocko'\. Did you mean 'roco'"):
        policies.pyramid("rocko")
    with pytest.raises(KVPatchError, match=r"Unknown policy 'rocko'\. Did you mean 'roco'"):
        kvpatch.get_policy("critical(adaptive(rocko))")
    assert kvpatch.get_policy("critical(adaptive(roco))").name == "critical_adaptive_roco"
    with pytest.raises(KVPatchError, match=r"has no option 'alfa'\. Did you mean 'alpha'\?"):
        policies.critical("roco", alfa=0.2)
    with pytest.raises(KVPatchError, match=r"over_heads=0\.2 is not a kvpatch Adaptive"):
        kvpatch.Policy("mine", kvpatch.get_policy("h2o").score, over_heads=0.2)


def test_renumbering_is_refused_where_positions_are_inside_the_keys():
    words = r"positions='renumbered' does not work for gpt2: its positions are added to the hidden states"
    with pytest.raises(KVPatchError, match=words), kvpatch.patched(make("gpt2"), "h2o", positions="renumbered"):
        pass
    patch = kvpatch.patch(make("llama"), "window", 0.5, positions="renumbered")
    with pytest.raises(KVPatchError, match="holds keys at their original positions"):
        patch.new_cache(DynamicCache())


def test_a_renumbered_gptj_says_when_a_head_would_hold_too_much():
    """Its table of positions is finite; what a head holds must fit, the text need not."""
    model, ids = make("gptj"), prompt(1, 600)
    patch = kvpatch.patch(model, "window", 100, positions="renumbered")
    with pytest.raises(KVPatchError, match=r"A head would hold 600 tokens, but this model has 512 positions: lower k"):
        model(ids)
    patch.remove()
    with kvpatch.patched(model, "window", 100, positions="renumbered", block=50), torch.no_grad():
        assert torch.isfinite(model(ids).logits).all()


SMALL = {"vocab_size": 9, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
ENCODERS = {
    "BertModel": lambda: BertModel(BertConfig(**SMALL)),
    "BertLMHeadModel": lambda: BertLMHeadModel(BertConfig(**SMALL)),
    "DistilBertModel": lambda: DistilBertModel(DistilBertConfig(vocab_size=9, dim=16, n_layers=1, n_heads=2, hidden_dim=16)),
    "ViTModel": lambda: ViTModel(ViTConfig(image_size=16, **SMALL)),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_gets_no_recipe(name):
    model = ENCODERS[name]()
    before = snapshot(model)
    words = rf"^{name} attends in both directions \(is_causal=False of \w+\): .*encoder"
    with pytest.raises(KVPatchError, match=words) as told:
        kvpatch.patch(model, "h2o")
    assert "register" not in str(told.value)
    assert snapshot(model) == before


def test_bad_models():
    with pytest.raises(KVPatchError, match="takes a model"), kvpatch.patched("gpt2", "h2o"):
        pass
    t5 = T5Model(T5Config(vocab_size=9, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(KVPatchError, match="T5Model is an encoder-decoder"), kvpatch.patched(t5, "h2o"):
        pass
    mamba = MambaForCausalLM(MambaConfig(vocab_size=9, hidden_size=16, num_hidden_layers=1))
    with pytest.raises(KVPatchError, match=r"MambaForCausalLM keeps a recurrent state, not keys and values: there is nothing"):
        kvpatch.patch(mamba, "h2o")
    crossed = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=16, n_head=2, n_layer=1, add_cross_attention=True))
    with pytest.raises(KVPatchError, match="GPT2Model has add_cross_attention=True"), kvpatch.patched(crossed, "h2o"):
        pass


def test_a_patched_model_is_not_patched_again():
    model = make("llama")
    with kvpatch.patched(model, "h2o", 0.5):
        inside = snapshot(model)
        with pytest.raises(KVPatchError, match="already patched with policy 'h2o'"), kvpatch.patched(model, "tova"):
            pass
        assert snapshot(model) == inside, "the outer patch stays in force"


def _static(model):
    return StaticCache(config=model.config, max_cache_len=64)


CALLS = [
    ({"past_key_values": DynamicCache()}, r"An empty DynamicCache was passed.*patch\.new_cache\(\)"),
    ({"past_key_values": _static}, r"An empty StaticCache was passed"),
    ({"past_key_values": ((torch.zeros(2, 4, 3, 8),) * 2,) * 2}, r"is a tuple, which.*new_cache\(DynamicCache\(past\)\)"),
    ({"past_key_values": ()}, r"is a tuple, which transformers takes no more: give patch\.new_cache\(\)\.$"),
    ({"attention_mask": torch.ones(2, 1, 20, 20)}, r"must be a padding mask \[B, tokens\], not \[2, 1, 20, 20\]"),
    ({"attention_mask": torch.ones(2, 7)}, r"attention_mask has 7 columns, but 0 tokens were seen and 20 are new"),
    ({"attention_mask": torch.tensor([[1] * 20, [0] * 20])}, r"Row 1 of the batch is all padding.*in later pieces"),
    ({"output_attentions": True}, r"output_attentions=True: under a budget no full attention matrix"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), CALLS, ids=[words[:30] for _, words in CALLS])
def test_bad_calls(arguments, words):
    model, ids = make("llama"), prompt(2, 20)
    arguments = {key: value(model) if callable(value) else value for key, value in arguments.items()}
    with kvpatch.patched(model, "h2o", 0.5):
        with pytest.raises(KVPatchError, match=words):
            model(ids, **arguments)
        assert model(ids).past_key_values.held(0).tolist() == [[10] * 4] * 2, "the next call works"


def test_a_patched_decoder_within_a_model_that_generates():
    model = make("llama")
    with (
        kvpatch.patched(model.model, "h2o", 0.5),
        pytest.raises(KVPatchError, match="around the patched one made it.*patch that"),
    ):
        model.generate(prompt(1, 20), max_new_tokens=2)


GENERATE = [
    ({"cache_implementation": "static"}, r"cache_implementation='static' asks for another cache"),
    ({"cache_implementation": "quantized"}, r"cache_implementation='quantized'"),
    ({"cache_implementation": "offloaded"}, r"cache_implementation='offloaded'"),
    ({"attention_mask": torch.tensor([[1] * 20, [1] * 15 + [0] * 5])}, r"Row 1 is padded on the right"),
    ({"attention_mask": torch.tensor([[1] * 20, [0] * 20])}, r"Row 1 of the batch is all padding.*with block=\.$"),
    ({"past_key_values": DynamicCache()}, r"An empty DynamicCache"),
    ({"output_attentions": True, "return_dict_in_generate": True}, r"output_attentions=True"),
]


@pytest.mark.parametrize(("arguments", "words"), GENERATE, ids=[words[:30] for _, words in GENERATE])
def test_bad_generate(arguments, words):
    model, ids = make("llama"), prompt(2, 20)
    with kvpatch.patched(model, "h2o", 0.5):
        with pytest.raises(KVPatchError, match=words):
            model.generate(ids, max_new_tokens=2, pad_token_id=0, **arguments)
        model.generation_config.cache_implementation = arguments.get("cache_implementation")
        if arguments.get("cache_implementation"):
            with pytest.raises(KVPatchError, match=words):
                model.generate(ids, max_new_tokens=2, pad_token_id=0)
        model.generation_config.cache_implementation = None
        assert model.generate(ids, max_new_tokens=2, pad_token_id=0).shape == (2, 22)


def test_pieces_of_a_prompt_of_which_the_first_is_padding_in_one_row():
    model, ids = make("llama"), prompt(2, 20)
    asked = {"attention_mask": left_pad(ids, [20, 8]), "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with kvpatch.patched(model, "h2o", 0.5):
        assert torch.equal(model.generate(ids, prefill_chunk_size=5, **asked), model.generate(ids, **asked))


def test_caches_out_of_place():
    model, ids = make("llama"), prompt(2, 20)
    with torch.no_grad():
        full = model(ids).past_key_values
        with kvpatch.patched(model, "h2o", 0.5) as patch:
            with pytest.raises(KVPatchError, match="filled outside the block"):
                model(ids[:, :1], past_key_values=full)
            with pytest.raises(KVPatchError, match="scores tokens by the attention"):
                patch.new_cache(full)
            cache = model(ids).past_key_values
            deeper = make("llama", layers=3)
            with (
                kvpatch.patched(deeper, "h2o", 0.5),
                pytest.raises(KVPatchError, match=r"made for a model of 2 layers, but this one has 3.*new_cache\(\)"),
            ):
                deeper(ids[:, :1], past_key_values=cache)
            with pytest.raises(KVPatchError, match="holds 2 rows, but the input has 1"):
                model(ids[:1, :1], past_key_values=cache)
            with pytest.raises(KVPatchError, match="marks a generated token as padding"):
                model(ids[:, :1], attention_mask=torch.tensor([[1] * 21, [1] * 20 + [0]]), past_key_values=cache)
        with pytest.raises(KVPatchError, match="not patched"):
            model(ids[:, :1], past_key_values=cache)


def test_positions_that_run_out_are_named():
    config = GPT2Config(vocab_size=VOCAB, n_embd=16, n_head=2, n_layer=1, n_positions=24, **IDS)
    model, ids = GPT2LMHeadModel(config).eval(), prompt(1, 20)
    with kvpatch.patched(model, "window", 4):
        with pytest.raises(KVPatchError, match="needs 25 positions, but this model has 24"):
            model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0).shape == (1, 25)


def test_an_interrupted_pass_is_noticed():
    model, ids = make("llama"), prompt(1, 20)
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        cache = patch.new_cache()
        handle = model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids, past_key_values=cache)
        handle.remove()
        with pytest.raises(KVPatchError, match="did not finish"):
            model(ids, past_key_values=cache)
        with pytest.raises(KVPatchError, match="Nothing to report"):
            kvpatch.patch(make("llama"), "h2o").report()


def test_registering():
    with pytest.raises(KVPatchError, match="already registered"):
        kvpatch.register_policy("h2o", kvpatch.get_policy("tova"))
    with pytest.raises(KVPatchError, match="must be an identifier"):
        kvpatch.register_policy("my policy", kvpatch.get_policy("tova"))
    with pytest.raises(KVPatchError, match=r"takes a kvpatch\.Policy"):
        kvpatch.register_policy("mine", "h2o")
    with pytest.raises(KVPatchError, match="takes an instance"):
        kvpatch.register_arch(object)
    with pytest.raises(KVPatchError, match="served by the adapter 'llama' already"):
        kvpatch.register_arch(kvpatch.arch.LlamaAdapter())
    kvpatch.register_policy("h2o_short", kvpatch.get_policy("h2o").with_options(recent=0.1))
    try:
        with kvpatch.patched(make("llama"), "h2o_short", 0.5) as patch:
            assert patch.settings.policy.options()["recent"] == 0.1
    finally:
        POLICIES.pop("h2o_short")
