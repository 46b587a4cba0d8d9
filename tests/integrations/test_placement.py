"""Where weights lie and in what numbers: offloading, several devices, half precision, quantized weights."""

import copy
import tempfile
import warnings
from functools import partial

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_submodules

import kvpatch
from kvpatch.arch.bound import BoundAdapter
from kvpatch.cache.lossless import LosslessCache
from kvpatch.errors import KVPatchError
from kvpatch.evaluation.check import Checks
from kvpatch.hooks.accelerate import device_of
from tests.helpers.comparing import CALIBRATED, DECODING, EVICTING, SMALL, SMALL_STEPS, calibrated
from tests.helpers.elsewhere import SECOND, move, second_device
from tests.helpers.marks import slow_but
from tests.helpers.tiny import FIVE, force, left_pad, make, prompt, snapshot
from tests.hooks.test_chat import make_tokenizer

IDS, FED, MASK = prompt(2, 30), prompt(2, 6, seed=2), left_pad(prompt(2, 30), [30, 21])
CRITICAL = {"policy": "critical_adakv", "k": 0.4, "window": 5}
LAYERS = {"llama_gqa": "model.layers", "mistral_sliding": "model.layers", "mpt": "transformer.blocks", "gptj": "transformer.h"}


def layers(name):
    return LAYERS.get(name, "transformer.h")


def logits_and_held(model, fed=FED, **options):
    with kvpatch.patched(model, **options):
        logits, cache = force(model, IDS, fed, MASK)
        return logits, [cache.positions(layer).tolist() for layer in range(len(cache.layers))]


# ---- the examples ----


def test_offloading_example():
    from examples import offloading

    for found in offloading.main().values():
        assert found["difference"] == 0
        assert found["caches"] == {"cpu"}
        assert found["away"] > 10


def test_quantized_example():
    pytest.importorskip("torchao")
    from examples import quantized

    for found in quantized.main().values():
        assert 0 < found["difference"] < 1e-3
        assert found["same tokens kept"]


# ---- hooks of accelerate ----


@pytest.mark.parametrize("how", ["memory", "disk"])
def test_a_chat_runs_on_offloaded_weights(how, tmp_path):
    model, tokenizer = make("llama_gqa", dtype=torch.float64), make_tokenizer()
    found = []
    for offloaded in (False, True):
        if offloaded:
            offload = {"memory": cpu_offload, "disk": partial(disk_offload, offload_dir=tmp_path)}[how]
            offload(model, execution_device="cpu")
        with kvpatch.patched(model, "h2o", 0.5) as patch:
            chat = patch.chat(tokenizer, max_new_tokens=7, do_sample=False)
            found.append([chat.send("hello"), "".join(chat.stream("what is it?")), chat.ids.tolist()])
    assert found[0] == found[1]


def test_lossless_drafts_on_offloaded_weights_are_refused_and_a_loop_runs():
    model, ids = make("llama_gqa", dtype=torch.float64), prompt(1, 30)
    want = model(ids).logits
    cpu_offload(model, execution_device="cpu")
    with kvpatch.patched(model, "h2o", 0.3, lossless=True) as patch, torch.no_grad():
        with pytest.raises(KVPatchError, match="takes no offloaded weights in generate.*: load them all, or leave it out"):
            model.generate(ids)
        cache = patch.new_cache()
        parts = [model(part, past_key_values=cache).logits for part in ids.split(20, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), want)


def by_map(model):
    """The second layer on disk, everything else in memory."""
    one = next(name for name in (*LAYERS.values(),) if name in dict(model.named_modules()))
    places = {name.rsplit(".", 1)[0]: "cpu" for name in model.state_dict() if not name.startswith(one)}
    places |= {name: "cpu" for name, _ in model.named_modules() if name.endswith("rotary_emb")}
    places |= {f"{one}.0": "cpu", f"{one}.1": "disk"}
    dispatch_model(model, places, main_device="cpu", offload_dir=tempfile.mkdtemp())


def whole_attention(model):
    """A hook on the attention module itself, which then holds its own forward."""
    cls = type(next(m for m in model.modules() if kvpatch.arch.adapter.adapter_of(m))).__name__
    cpu_offload(model, torch.device("cpu"), preload_module_classes=[cls])


HOOKS = {
    "cpu": lambda model: cpu_offload(model, torch.device("cpu")),
    "disk": lambda model: disk_offload(model, tempfile.mkdtemp(), torch.device("cpu")),
    "map": by_map,
    "attention": whole_attention,
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("name", FIVE)
def test_offloaded(name, kind):
    model = make(name)
    plain, expected = force(model, IDS, FED, MASK)[0], logits_and_held(model, **CRITICAL)
    HOOKS[kind](model)
    before = snapshot(model)
    logits, held = logits_and_held(model, **CRITICAL)
    assert torch.equal(logits, expected[0])
    assert held == expected[1]
    assert snapshot(model) == before
    assert torch.equal(force(model, IDS, FED, MASK)[0], plain)


@pytest.mark.parametrize("kind", ["attention", "map"])
def test_hooks_removed_inside(kind):
    model = make("llama_gqa")
    plain, expected = force(model, IDS, FED, MASK)[0], logits_and_held(model, **CRITICAL)[0]
    HOOKS[kind](model)
    with kvpatch.patched(model, **CRITICAL):
        remove_hook_from_submodules(model)
        assert torch.equal(force(model, IDS, FED, MASK)[0], expected)
    assert torch.equal(force(model, IDS, FED, MASK)[0], plain)
    left = [name for name, module in model.named_modules() for value in vars(module).values() if "kvpatch" in repr(value)]
    assert not left
    assert not any("_old_forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("kind", ["attention", "map"])
def test_hooks_added_inside(kind):
    model = make("llama_gqa")
    plain, expected = force(model, IDS, FED, MASK)[0], logits_and_held(model, **CRITICAL)[0]
    with kvpatch.patched(model, **CRITICAL):
        HOOKS[kind](model)
        assert torch.equal(force(model, IDS, FED, MASK)[0], expected)
    assert any(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(force(model, IDS, FED, MASK)[0], plain)
    assert logits_and_held(model, **CRITICAL)[0].equal(expected)
    remove_hook_from_submodules(model)
    assert torch.equal(force(model, IDS, FED, MASK)[0], plain)
    for module in model.modules():
        assert "kvpatch" not in repr([vars(module).get("forward"), vars(module).get("_old_forward")])


@pytest.mark.parametrize("kind", ["cpu", "attention"])
def test_saved_caches_know_offloaded_weights(kind, tmp_path):
    """A cache goes from a model in memory to the same one offloaded, onto its device, and not to one of other weights."""
    model, path = make("llama_gqa"), tmp_path / "cache.safetensors"
    with kvpatch.patched(model, **CRITICAL) as patch:
        _, cache = force(model, IDS, FED)
        patch.save_cache(cache, path)
        expected = force(model, FED[:, :1], FED[:, 1:], cache=cache)[0]
    HOOKS[kind](model)
    assert device_of(model.model).type == "cpu"
    with kvpatch.patched(model, **CRITICAL) as patch:
        loaded = patch.load_cache(path)
        assert {layer.keys.device.type for layer in loaded.layers} == {"cpu"}
        assert torch.equal(force(model, FED[:, :1], FED[:, 1:], cache=loaded)[0], expected)
    other = make("llama_gqa", seed=1)
    HOOKS[kind](other)
    with kvpatch.patched(other, **CRITICAL) as patch, pytest.raises(kvpatch.KVPatchError, match="weights is"):
        patch.load_cache(path)


# ---- layers on several devices ----


@pytest.fixture
def pair(request):
    """A model on the first device and the same one with its second layer on another."""
    with torch.no_grad(), second_device():
        one = make(request.param)
        two = copy.deepcopy(one)
        second = two.get_submodule(layers(request.param) + ".1")
        move(second)
        hook = AlignDevicesHook(SECOND, io_same_device=True, skip_keys=["past_key_values", "layer_past"])
        add_hook_to_module(second, hook)
        yield one, two


SPREAD = (
    {"policy": "keyformer", "k": 0.3, "shared": True},
    {"policy": "critical_adakv", "k": 0.3, "window": 5},
    {"policy": "h2o", "k": 0.3, "positions": "renumbered"},
    {"policy": "keyformer", "k": 0.3},
    {"policy": "keyformer", "k": 0.3, "resample": True},
    {"policy": "scissorhands", "k": 0.3},
    {"policy": "tova", "k": 0.3},
    {"policy": "roco", "k": 0.3},
    {"policy": "key_norm", "k": 0.3},
    {"policy": "pyramidkv", "k": 0.3, "window": 5},
    {"policy": "adaptive(tova)", "k": 0.3},
    {"policy": "keyformer", "k": 0.3, "block": 8},
    {"policy": "h2o", "k": 0.6, "protect": [3, 5, 7]},
)


@pytest.mark.parametrize("pair", slow_but((), FIVE), indirect=True)
def test_layers_on_two_devices(pair):
    """Every layer's cache lies where the layer computes, and nothing else changes: bit for bit."""
    one, two = pair
    for options in SPREAD if one.config.model_type == "llama" else SPREAD[:3]:
        if options.get("positions") and one.config.model_type == "gpt2":
            continue
        expected = logits_and_held(one, FED[:, :3], **options)
        with kvpatch.patched(two, **options) as patch:
            logits, cache = force(two, IDS, FED[:, :3], MASK)
            held = [cache.positions(layer).tolist() for layer in range(2)]
            assert patch.report().kept().any()
        assert torch.equal(logits, expected[0]), options
        assert held == expected[1]
        for layer, device in enumerate((torch.device("cpu"), SECOND)):
            one_layer = cache.layers[layer]
            lies = [one_layer.keys, one_layer.values, one_layer.positions, *one_layer.state.values()]
            assert {tensor.device for tensor in lies} == {device}


def _go_on(model, patch):
    """A second turn, whose ids are compared with those of the first."""
    cache, more = patch.new_cache(), prompt(1, 5, seed=4)
    first = model.generate(IDS[:1], past_key_values=cache, **GREEDY)
    return model.generate(torch.cat([first.to("cpu"), more], 1), past_key_values=cache, **GREEDY)


GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
GIVEN = {
    "a text": lambda model, patch: model.generate(IDS[:1], **GREEDY),
    "padded texts": lambda model, patch: model.generate(IDS, attention_mask=MASK, num_beams=2, **GREEDY),
    "pieces": lambda model, patch: model.generate(IDS[:1], prefill_chunk_size=8, **GREEDY),
    "a later turn": _go_on,
    "a prefix": lambda model, patch: model.generate(IDS[:1], past_key_values=patch.prefix(IDS[:1, :20]), **GREEDY),
}
SETTINGS = (
    {"policy": "h2o", "k": 0.4, "protect": [3, 5, 7]},
    {"policy": "critical_adakv", "k": 0.4, "window": 5},
    {"policy": "kvzip", "k": 0.4},
    {"policy": "h2o", "k": 0.4, "block": 8},
    {"policy": "h2o", "k": 0.4, "lossless": True},
)


@pytest.mark.parametrize("options", SETTINGS, ids=str)
@pytest.mark.parametrize("given", GIVEN)
def test_inputs_may_lie_on_the_cpu(given, options, monkeypatch):
    """transformers moves them for each pass, but not for assisted decoding, by which lossless=True verifies."""
    if options.get("lossless"):
        if given in ("padded texts", "a prefix"):
            pytest.skip("refused under lossless=True")
        # this second device calls itself a CPU, as the host is
        monkeypatch.setattr(LosslessCache, "_bring", LosslessCache._bring_staged)
    model, run = make("llama_gqa"), GIVEN[given]
    with torch.no_grad():
        with kvpatch.patched(model, **options) as patch:
            wanted = run(model, patch)
        with second_device():
            move(model)
            with kvpatch.patched(model, **options) as patch:
                found = run(model, patch)
    assert torch.equal(wanted, found.inner if found.device == SECOND else found)


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["llama_gqa"], indirect=True)
def test_what_happens_to_caches_on_two_devices(pair, tmp_path):
    """generate() with beams and lookup, clones, rows that move, saved caches, caches that are taken over."""

    def scores(model, patch, **options):
        out = model.generate(
            IDS[:1], max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True, **options
        )
        return torch.stack(out.logits)

    def rows(model, patch):
        cache = force(model, IDS, FED[:, :2])[1].clone()
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([1, 0, 2, 3]))
        cache.batch_select_indices(torch.tensor([0, 2]))
        return model(FED[:, 2:3], past_key_values=cache).logits

    def saved(model, patch):
        patch.save_cache(force(model, IDS, FED[:, :2])[1], tmp_path / "cache.safetensors")
        cache = patch.load_cache(tmp_path / "cache.safetensors")
        assert cache.layers[1].keys.device == device_of(model.get_submodule("model.layers.1"))
        return model(FED[:, 2:3], past_key_values=cache).logits

    def taken_over(model, patch):
        cache = patch.new_cache(copy.deepcopy(pasts[model]))
        return force(model, FED[:, :3], FED[:, 3:], cache=cache)[0]

    pasts = {model: model(IDS, use_cache=True).past_key_values for model in pair}
    shared = {"policy": "keyformer", "k": 0.3, "shared": True}
    cases = [(rows, shared), (rows, CRITICAL), (saved, shared), (saved, CRITICAL), (taken_over, {"policy": "window", "k": 12})]
    cases += [(lambda m, p: scores(m, p, num_beams=3), shared)]
    cases += [(lambda m, p: scores(m, p, prompt_lookup_num_tokens=3), CRITICAL)]
    for what, options in cases:
        with kvpatch.patched(pair[0], **options) as patch:
            expected = what(pair[0], patch)
        with kvpatch.patched(pair[1], **options) as patch:
            assert torch.equal(what(pair[1], patch), expected)


# ---- half precision and quantized weights ----


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FIVE)
def test_half_precision(name, dtype):
    """k=1.0, eviction against masking, padding, seeds, and the model afterwards."""
    results = Checks(make(name, dtype=dtype), "keyformer", 0.5).run()
    assert len(results) == 7
    assert all(result.passed for result in results), results


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_policies_in_half_precision(dtype):
    """They hold their budget of tokens, and scores are summed in float32."""
    model = make("llama_gqa", dtype=dtype)
    for policy in ("full", *EVICTING, *DECODING, *CALIBRATED):
        options = {"window": 5} if "window" in kvpatch.get_policy(policy).options() else {}
        if policy in CALIBRATED:
            options = SMALL.get(policy, {}) | calibrated(policy, "llama_gqa", dtype)
        options |= {**SMALL_STEPS[policy], "every": 1} if policy in SMALL_STEPS else {}
        with kvpatch.patched(model, policy, 0.3, **options):
            logits, cache = force(model, IDS, FED)
        assert logits.dtype == dtype
        assert torch.isfinite(logits).all()
        assert cache.layers[0].keys.dtype == dtype
        assert all(tensor.dtype != dtype for tensor in cache.layers[0].state.values())
        if policy == "duo":
            assert {7, IDS.shape[1] + FED.shape[1]} >= {*cache.held(0).unique().tolist()}
        elif kvpatch.get_policy(policy).schedule == "both" and policy != "full":
            assert (cache.held(0) == 9).all()


@pytest.fixture
def eight_bits():
    """A quantized model, and the same with what its weights stand for."""
    quantization = pytest.importorskip("torchao.quantization")
    from examples.quantized import restored

    def pair(name="llama_gqa", dtype=torch.float32):
        model = make(name, dtype=dtype)
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
        return model, restored(copy.deepcopy(model))

    return pair


@pytest.mark.parametrize("name", ["llama_gqa", "mistral_sliding", "mpt", "gptj"])
def test_eight_bit_weights(eight_bits, name):
    small, plain = eight_bits(name)
    for options in ({"policy": "keyformer", "k": 1.0}, {"policy": "keyformer", "k": 0.3}, CRITICAL):
        logits, held = logits_and_held(small, **options)
        expected, expected_held = logits_and_held(plain, **options)
        torch.testing.assert_close(logits, expected, atol=5e-5, rtol=0)
        assert held == expected_held
    assert all(result.passed for result in Checks(small).run())


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
def test_output_rows_of_eight_bit_weights(eight_bits, dtype, atol):
    """What CriticalKV multiplies values with is the weight that the quantized projection stands for."""
    rows = []
    for model in eight_bits(dtype=dtype):
        attn = model.model.layers[0].self_attn
        bound_adapter = BoundAdapter(kvpatch.arch.adapter.adapter_of(attn), attn, 2)
        rows.append(bound_adapter.output_rows(torch.zeros(1, 2, 3, attn.head_dim, dtype=dtype), 2))
    assert [worked_out for _, worked_out in rows] == [True, False]
    assert rows[1][0].abs().max() > 0.5
    torch.testing.assert_close(rows[0][0], rows[1][0], atol=atol, rtol=0)


def test_saved_caches_know_eight_bit_weights(eight_bits, tmp_path):
    path = tmp_path / "cache.safetensors"
    small, plain = eight_bits()
    with kvpatch.patched(small, **CRITICAL) as patch:
        _, cache = force(small, IDS, FED)
        patch.save_cache(cache, path)
        expected = force(small, FED[:, :1], FED[:, 1:], cache=cache)[0]
        assert torch.equal(force(small, FED[:, :1], FED[:, 1:], cache=patch.load_cache(path))[0], expected)
    with kvpatch.patched(plain, **CRITICAL) as patch, pytest.raises(kvpatch.KVPatchError, match="weights is"):
        patch.load_cache(path)


# ---- what is refused ----


class _Mesh:
    ndim = 1

    def size(self):
        return 2

    def get_local_rank(self):
        return 0

    def get_group(self):
        return None


def _sharded(name, plan):
    """A model that says of itself what one that transformers sharded says."""
    model = make(name)
    model._tp_size, model._tp_plan, model._device_mesh = 2, plan, _Mesh()
    return model


REFUSED = {
    "ALiBi": (
        lambda: _sharded("mpt", {"transformer.blocks.*.attn.out_proj": "rowwise"}),
        "mpt has an ALiBi slope for each head, which kvpatch does not share out over processes: load the model without a "
        "tp_plan.",
    ),
    "sequence": (
        lambda: _sharded("llama_gqa", {"model.norm": "sequence_parallel"}),
        "The tp_plan shards the sequence ('sequence_parallel'), but a cache needs whole prompts: leave those rules out of the "
        "plan.",
    ),
    "pipeline": (
        lambda: _pipeline(),
        "Of this model's layers only [1] are on this process (pipeline parallel), but a budget counts all of them: load it "
        "with tp_plan='auto' (tensor parallel) or with a device_map.",
    ),
    "twice": (
        lambda: _repeated(),
        "Attention modules of this model share a layer_idx ([0, 0, 1, 1]): it passes through its layers more than once per "
        "token, with a cache for each time, which kvpatch does not serve.",
    ),
}


def _repeated():
    model = make("llama_gqa")
    model.model.layers = torch.nn.ModuleList([*model.model.layers, *model.model.layers])
    return model


def _pipeline():
    model = make("llama_gqa")
    model.model.layers[0] = torch.nn.Identity()
    return model


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    build, words = REFUSED[case]
    model = build()
    before = snapshot(model)
    with pytest.raises(kvpatch.KVPatchError) as caught, kvpatch.patched(model, "h2o"):
        pass
    assert str(caught.value) == words
    assert snapshot(model) == before


@pytest.fixture
def no_parameters():
    """A model whose linear modules pack their weights where neither parameters nor buffers show them."""

    def made(name):
        model = make(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the module is deprecated
            return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)

    return made


def generated(model):
    """Logits of generated tokens."""
    options = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}
    return torch.stack(model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=6, **options).logits)


@pytest.mark.parametrize("name", ["llama_gqa", "mistral_sliding", "mpt", "gptj", "falcon_gqa"])
def test_linears_that_hold_no_parameters(no_parameters, name, tmp_path):
    model = no_parameters(name)
    want = generated(model)
    with kvpatch.patched(model, "h2o", 1.0):
        torch.testing.assert_close(generated(model), want, atol=2e-5, rtol=0)
    for options in ({"policy": "h2o", "k": 8}, {"policy": "snapkv", "k": 8, "window": 5}, {**CRITICAL, "k": 8}):
        with kvpatch.patched(model, **options) as patch:
            found = generated(model)
            assert torch.isfinite(found).all() and not torch.equal(found, want)
            cache = patch.new_cache()
            model(IDS, past_key_values=cache)
            assert cache.held(0).float().mean() == 8  # adaptive: the mean over heads
            patch.save_cache(cache, tmp_path / "cache")
            assert torch.equal(patch.load_cache(tmp_path / "cache").positions(1), cache.positions(1))


def test_output_rows_of_linears_that_hold_no_parameters(no_parameters):
    attn = no_parameters("llama_gqa").model.layers[0].self_attn
    bound_adapter = BoundAdapter(kvpatch.arch.adapter.adapter_of(attn), attn, 2)
    rows, worked_out = bound_adapter.output_rows(torch.zeros(1, 2, 3, attn.head_dim), 2)
    assert worked_out
    want = attn.o_proj.weight().dequantize().T.reshape(2, 2, attn.head_dim, -1)
    torch.testing.assert_close(rows, want, atol=1e-2, rtol=0)
