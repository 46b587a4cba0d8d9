"""The bytes of a plan are those of a cache that generate() filled, for every family and policy."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import kvpatch
from kvpatch.arch.twin import shrink_config
from kvpatch.backends.entry_sizes import count_centre_bytes, count_entry_bytes
from kvpatch.cache.holding import count_held
from kvpatch.planning.configuration import Configuration
from kvpatch.planning.refused import REFUSED
from tests.helpers import tiny, tiny_families
from tests.helpers.tiny import prompt

FAMILIES = ("llama_gqa", "mistral_sliding", "gemma3", "gpt2", "mpt", "deepseek_v3")
MORE = ("falcon_gqa", "bloom", "gptj", "qwen2_mixed", "gpt_oss", "gpt_bigcode", "llama4", "phi3_sliding", "gpt_neo")
BUDGETS = (
    ("full", 1.0, 16, {}), ("h2o", 0.3, 16, {}), ("h2o", 40, 8, {}), ("snapkv", 40, 16, {"window": 8}),
    ("snapkv", 0.3, 4, {"window": 8}), ("adakv", 0.3, 16, {"window": 8}), ("pyramidkv", 0.3, 16, {"window": 8}),
    ("kvzip", 40, 16, {}), ("lazy", 60, 16, {"every": 4, "recent": 8}), ("h2o", "24KiB", 16, {}),
)  # fmt: skip
B, T, NEW = 2, 120, 11  # the last of the new tokens is returned and not fed


def make_model(name):
    return tiny.make(name) if name in {**tiny.MODELS, **tiny.MORE} else tiny_families.make(name)


def fill_cache(model):
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    return model.generate(prompt(B, T), **options).past_key_values


@pytest.fixture(scope="module", params=[*FAMILIES, *MORE])
def saved(request, tmp_path_factory):
    """A model, and a folder with its config.json alone."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(request.param)
    model.config.save_pretrained(folder)
    return model, folder


@pytest.mark.parametrize(("policy", "k", "bits", "options"), BUDGETS)
def test_a_plan_has_the_bytes_of_the_cache(saved, policy, k, bits, options):
    """At least what its tokens take; at most that with spare slots: 1/16 or 8 of a head, 16 and 1/50 where heads share."""
    model, folder = saved
    with kvpatch.patched(model, policy, k=k, bits=bits, **options):
        cache = fill_cache(model)
    plan = kvpatch.plan(folder, policy, k, tokens=T, new=NEW - 1, batch=B, bits=bits, **options)
    held = sum(int(cache.held(layer).sum()) for layer in range(len(cache.layers)))
    assert B * plan.held <= cache.nbytes <= B * plan.allocated
    if plan.policy != "lazy":  # whose heads wait to evict several at once
        assert sum(plan.kept) * B * cache.layers[0].positions.shape[1] - held in range(-B * 8, B * 8)
    waste = (plan.allocated - plan.held) / plan.held
    slots = max(8, max(plan.kept) / 16, options.get("every", 1)) + (
        16 + max(plan.kept) / 50 if policy in ("adakv", "kvzip") else 0
    )
    assert waste <= slots / min(plan.kept) * 1.1


@pytest.mark.parametrize(("policy", "k", "bits", "options"), BUDGETS)
def test_a_plan_counts_as_the_settings_of_a_patch(saved, policy, k, bits, options):
    model, folder = saved
    with kvpatch.patched(model, policy, k=k, bits=bits, **options) as patch:
        cache = fill_cache(model)
    plan, allocated = kvpatch.plan(folder, policy, k, tokens=T, new=NEW - 1, bits=bits, **options), 0
    for index, layer in enumerate(cache.layers):
        H, (key, value) = layer.positions.shape[1], layer.kv.sizes
        said = count_held(patch.settings, index, T, NEW - 1, heads=H)
        assert plan.kept[index] == sum(said.heads) // H
        entry = count_entry_bytes(bits, key, value, layer.dtype.itemsize, layer.latent)
        allocated += H * (said.slots * entry + count_centre_bytes(bits, key, layer.dtype.itemsize))
    assert plan.allocated == allocated


def test_the_full_cache_has_the_bytes_of_the_unpatched_one(saved):
    """A sliding layer's window counts the token that attends, which transformers does not keep."""
    model, folder = saved
    if model.config.model_type in ("falcon", "gpt_neo"):
        pytest.skip("transformers repeats Falcon's heads, and keeps GPT-Neo's whole text")
    layers = fill_cache(model).layers
    taken = sum(one.keys.nbytes + one.values.nbytes for one in layers)
    sliding = sum((one.keys[:, :, 0].nbytes + one.values[:, :, 0].nbytes) * one.is_sliding for one in layers)
    assert B * kvpatch.plan(folder, tokens=T, new=NEW - 1).full == taken + sliding


def test_weights_are_counted_from_the_configuration(saved):
    model, folder = saved
    plan = kvpatch.plan(folder, tokens=T)
    assert (plan.weights, plan.weights_from) == (sum(one.nbytes for one in model.parameters()), "config.json")


def test_a_dtype_halves_everything(tmp_path):
    make_model("llama_gqa").config.save_pretrained(tmp_path)
    whole, half = (kvpatch.plan(tmp_path, "h2o", tokens=T, dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert (whole.weights, whole.full, whole.held) == (2 * half.weights, 2 * half.full, 2 * half.held)


def test_weights_are_read_from_safetensors(tmp_path):
    model = make_model("llama_gqa").to(torch.bfloat16)
    model.config.dtype = "bfloat16"
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    nbytes = sum(one.nbytes for one in model.parameters())
    for name, source in (("one", "the header of model.safetensors"), ("many", "the index model.safetensors.index.json")):
        plan = kvpatch.plan(tmp_path / name, tokens=T)
        assert (plan.weights, plan.weights_from, plan.dtype) == (nbytes, source, "bfloat16")


def test_what_is_held_while_a_prompt_is_read_bounds_the_peak(saved):
    model, folder = saved
    with kvpatch.patched(model, "snapkv", k=0.2, window=8) as patch:
        model.generate(prompt(B, T), max_new_tokens=1, do_sample=False)
    plan = kvpatch.plan(folder, "snapkv", 0.2, tokens=T, batch=B, window=8)
    assert plan.held < plan.reading and patch.report().peak_nbytes <= B * plan.reading * 1.1


@pytest.mark.parametrize(("policy", "k", "bits"), [("kvzip", 12, 16), ("kvzip", 40, 4), ("global_topk(h2o)", 90, 8)])
def test_layers_that_share_a_budget_get_new_buffers_beside_all_of_the_old(policy, k, bits, tmp_path):
    model = tiny.make("llama_gqa")
    model.config.save_pretrained(tmp_path)
    with kvpatch.patched(model, policy, k, bits=bits) as patch:
        model.generate(prompt(B, T), max_new_tokens=1, do_sample=False)
    peak = patch.report().peak_nbytes
    assert 0.9 * B * (reading := kvpatch.plan(tmp_path, policy, k, bits=bits, tokens=T).reading) < peak <= B * reading


@pytest.mark.parametrize("kind", ["gemma3n_text", "gemma4_text", "falcon_h1", "mimo_v2_flash"])
def test_layers_of_sizes_of_their_own(kind, tmp_path):
    """Full layers of Gemma 4 have heads of their own; Falcon H1 names no kinds, and values of MiMo are narrow."""
    pytest.importorskip(f"transformers.models.{kind.removesuffix('_text')}")
    model = AutoModelForCausalLM.from_config(shrink_config(CONFIG_MAPPING[kind]())).eval()
    model.config.save_pretrained(tmp_path)
    with kvpatch.patched(model, "h2o", k=40):
        cache = fill_cache(model)
    plan = kvpatch.plan(tmp_path, "h2o", 40, tokens=T, new=NEW - 1)
    assert plan.weights == sum(one.nbytes for one in model.parameters())
    assert plan.kept == tuple(int(cache.held(layer).max()) for layer in range(len(cache.layers)))
    assert B * plan.held <= cache.nbytes <= B * plan.allocated
    sizes = [(layer.positions.shape[1], *layer.kv.sizes) for layer in cache.layers]
    shape = Configuration.read(tmp_path / "config.json", "m").read_shape()
    assert sizes == [(one.heads, one.key, one.value) for one in shape.layers]


@pytest.mark.parametrize("kind", ["gemma4_text", "gemma4_unified_text"])
@pytest.mark.parametrize("size", [32, 64])
def test_the_numbers_of_many_layers_have_leading_zeros(kind, size, tmp_path):
    """Such as "05" beside "11"; a layer that is not named is like all others."""
    pytest.importorskip(f"transformers.models.{kind.removesuffix('_text')}")
    CONFIG_MAPPING[kind](num_hidden_layers=12, head_dim=32, global_head_dim=size).save_pretrained(tmp_path)
    layers = Configuration.read(tmp_path / "config.json", "m").read_shape().layers
    assert [one.key for one in layers] == ([32] * 5 + [size]) * 2


@pytest.mark.parametrize("kind", ["zamba", "zamba2"])
def test_a_head_s_size_by_another_name(kind, tmp_path):
    """Attention that is twice as wide as the model."""
    config = CONFIG_MAPPING[kind]()
    config.save_pretrained(tmp_path)
    layers = Configuration.read(tmp_path / "config.json", "m").read_shape().layers
    assert {one.key for one in layers} == {2 * config.hidden_size // config.num_attention_heads}


@pytest.mark.parametrize("kind", ["bailing_hybrid", "kimi_linear"])
def test_positions_by_another_name(kind, tmp_path):
    pytest.importorskip(f"transformers.models.{kind}")
    config = CONFIG_MAPPING[kind]()
    config.save_pretrained(tmp_path)
    assert Configuration.read(tmp_path / "config.json", "m").read_shape().positions == config.max_position_embeddings


def test_older_files_name_no_layers():
    """Layers of files that transformers wrote before it named their types."""
    base = {"num_hidden_layers": 6, "hidden_size": 32, "num_attention_heads": 4, "sliding_window": 7}

    def windows(**values):
        return [one.window for one in Configuration(base | values, "m").read_shape().layers]

    assert windows(model_type="gemma2") == [7, None] * 3
    assert windows(model_type="gemma3_text") == [7] * 5 + [None]
    assert windows(model_type="cohere2", sliding_window_pattern=3) == [7, 7, None] * 2
    assert windows(model_type="qwen2", use_sliding_window=True, max_window_layers=4) == [None] * 4 + [7] * 2
    assert windows(model_type="qwen2", use_sliding_window=False) == windows(model_type="llama") == [None] * 6
    assert windows(model_type="mistral") == [7] * 6
    full = {"head_dim": 8, "global_head_dim": 16, "num_key_value_heads": 2, "num_global_key_value_heads": 1}
    full["layer_types"] = ["sliding_attention"] * 5 + ["full_attention"]
    for equal, heads, kind in ((True, 1, "gemma4_text"), (False, 2, "gemma4_text"), (True, 1, "gemma4_unified_text")):
        layers = Configuration(base | full | {"model_type": kind, "attention_k_eq_v": equal}, "m").read_shape().layers
        assert [(one.heads, one.key, one.window) for one in layers] == [(2, 8, 7)] * 5 + [(heads, 16, None)]
    bloom = {"model_type": "bloom", "n_layer": 2, "num_attention_heads": 4, "n_embed": 32}
    assert [one.key for one in Configuration(bloom, "m").read_shape().layers] == [8, 8]


def test_a_hybrid_s_states_hold_no_tokens():
    values = {"num_hidden_layers": 8, "hidden_size": 32, "num_attention_heads": 4, "model_type": "qwen3_next"}
    shape = Configuration(values | {"full_attention_interval": 4}, "m").read_shape()
    assert (len(shape.layers), shape.states) == (2, 6)
    shape = Configuration(values | {"layer_types": ["conv", "full_attention"] * 4}, "m").read_shape()
    assert (len(shape.layers), shape.states) == (4, 4)
    with pytest.raises(kvpatch.KVPatchError, match="does not say layer_types"):
        Configuration(values | {"mamba_d_state": 16}, "m").read_shape()


@pytest.mark.parametrize("kind", ["bailing_hybrid", "gemma3n_text", "gpt_oss", "kolibri1", "ministral", "olmo3", "vaultgemma"])
def test_layers_that_the_class_names(kind):
    """A file that does not name its layers is read by the rule of its class."""
    pytest.importorskip(f"transformers.models.{kind.removesuffix('_text')}")
    config = CONFIG_MAPPING[kind]()
    values = {name: value for name, value in config.to_dict().items() if name != "layer_types"}
    named, unnamed = (Configuration(one, "m").read_shape() for one in (config.to_dict(), values))
    assert unnamed == named and (named.states or any(one.window for one in named.layers))


def test_layers_by_the_numbers_of_kimi_linear():
    """The files of its checkpoints count from 1."""
    pytest.importorskip("transformers.models.kimi_linear")
    numbers = {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "kda_layers": [n for n in range(1, 28) if n % 4 and n != 27]}
    values = {name: value for name, value in CONFIG_MAPPING["kimi_linear"]().to_dict().items() if name != "layer_types"}
    values["linear_attn_config"] = numbers | {"head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4}
    shape = Configuration(values, "m").read_shape()
    kinds = CONFIG_MAPPING["kimi_linear"].from_dict(values).layer_types
    assert (len(shape.layers), shape.states) == (kinds.count("full_attention"), kinds.count("linear_attention")) == (7, 20)


def test_layers_that_no_file_names_are_not_guessed():
    """A plan that took all layers for full attention would count bytes that no cache has."""
    wrong, read = [], 0
    for kind in set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - {name for names in REFUSED.values() for name in names}:
        try:
            config = CONFIG_MAPPING[kind]()
            values = {name: value for name, value in config.to_dict().items() if name != "layer_types"}
            kinds = type(config).from_dict(values).layer_types
            shape = Configuration(values, "m").read_shape()
        except Exception:  # needs more than its defaults, names no kinds of layers, or the plan refuses it
            continue
        borrowed = getattr(config, "num_kv_shared_layers", 0) or 0
        attention = [one for one in kinds or () if one not in ("linear_attention", "conv", "moe", "mlp")]
        slides = ["sliding" in one or "chunked" in one for one in attention[: len(attention) - borrowed]]
        read += bool(attention)
        if attention and slides != [one.window is not None for one in shape.layers]:
            wrong.append(kind)
    assert not wrong and read > 20


def test_the_part_that_writes_text_counts():
    text = {"model_type": "gemma3_text", "num_hidden_layers": 6, "hidden_size": 2560, "sliding_window": 1024}
    shape = Configuration({"model_type": "gemma3", "dtype": "bfloat16", "text_config": text}, "m").read_shape()
    assert (shape.kind, shape.dtype, shape.layers[0].heads, shape.layers[0].key) == ("gemma3_text", "bfloat16", 4, 256)
    own = type(make_model("gemma3").config)()
    assert (own.num_key_value_heads, own.head_dim, own.max_position_embeddings) == (4, 256, shape.positions)
