"""Decode steps under torch.compile: one graph, no recompilation, the numbers of uncompiled steps, no waiting for the device."""

import itertools
import os
import shutil
from dataclasses import replace

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters
from transformers import CompileConfig

import kvpatch
from kvpatch.cache import checks
from kvpatch.cache.compiled import can_trace
from kvpatch.cache.modes import Appending, Growing
from kvpatch.hooks import inputs
from kvpatch.policies.parallel import Parallel
from tests.helpers.comparing import same_tokens
from tests.helpers.marks import slow_but
from tests.helpers.running import read
from tests.helpers.tiny import FIVE, make, prompt

pytestmark = pytest.mark.usefixtures("no_gradients")

STEPS = 12
ROWS, COLUMNS = 2, 40


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def held(cache):
    """Positions of every layer and head in order."""
    return [cache.positions(layer).sort(-1).values for layer in range(len(cache.layers))]


def decode(model, policy, k, kinds, *, room=None, backend="aot_eager", **options):
    """Logits of a prompt and of one step for each of `kinds` ("eager" or "compiled"), and the cache."""
    ids, more = prompt(ROWS, COLUMNS), prompt(ROWS, len(kinds), seed=3)
    with kvpatch.patched(model, policy, k, **options) as patch:
        cache = patch.new_cache(room=room)
        outs = [model(ids, past_key_values=cache).logits[:, -1]]
        compiled = torch.compile(model.forward, fullgraph=True, backend=backend)
        for t, kind in enumerate(kinds):
            step = compiled if kind == "compiled" else model
            outs.append(step(more[:, t : t + 1], past_key_values=cache).logits[:, -1])
        return torch.stack(outs), cache


def graphs():
    return counters["stats"]["unique_graphs"]


CASES = [
    *((name, "h2o", {"k": 0.5}) for name in FIVE),
    ("llama_gqa", "roco", {"k": 0.5}),
    ("llama_gqa", "keyformer", {"k": 0.5, "tau": (1.0, 9.0), "generation_length": 12, "damping": 0.3}),
    ("llama_gqa", "keyformer", {"k": 0.5, "resample": True}),
    ("llama_gqa", "scissorhands", {"k": 0.5}),
    ("llama_gqa", "random", {"k": 0.5}),
    ("llama_gqa", "key_norm", {"k": 0.5}),
    ("llama_gqa", "tova", {"k": 0.5}),
    ("llama_gqa", "critical(tova)", {"k": 0.5}),
    ("llama_gqa", "critical(roco)", {"k": 0.5}),
    ("llama_gqa", "h2o", {"k": 0.5, "positions": "renumbered"}),
    ("llama_gqa", "h2o", {"k": 45, "room": STEPS}),  # fills up while it decodes
    ("mpt", "roco", {"k": 6, "schedule": "decode", "room": STEPS}),
    ("llama_gqa", "full", {"k": 1.0, "room": STEPS}),
    ("mistral_sliding", "snapkv", {"k": 0.5, "room": STEPS}),
    ("mpt", "snapkv", {"k": 0.5, "room": STEPS, "positions": "renumbered"}),
    ("llama_gqa", "adakv", {"k": 0.5, "room": STEPS}),
    ("llama_gqa", "adakv", {"k": 0.4, "window": 5, "room": STEPS}),
    ("llama_gqa", "critical(adaptive(roco))", {"k": 0.3, "room": STEPS}),
    ("llama_gqa", "defensive_snapkv", {"k": 0.5, "room": STEPS}),
    ("llama_gqa", "layer_defensive", {"k": 0.4, "window": 5, "room": STEPS}),
    ("llama_gqa", "global_topk(snapkv)", {"k": 0.4, "window": 5, "room": STEPS}),
    ("llama_gqa", "kvzip", {"k": 0.4, "room": STEPS}),
    ("llama_gqa", "h2o", {"k": 0.5, "recent": 2, "quota": [(3, 20), (25, 40)]}),
    ("mistral_sliding", "roco", {"k": 45, "protected": 4, "quota": [(3, 20), (25, 40)], "room": STEPS}),
]
FAST = [CASES[i] for i in (0, 2, 6, 15, 21)]  # rotary, ALiBi, temperatures, slots that fill up, ragged


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "policy", "options"), slow_but(FAST, CASES), ids=lambda value: str(value))
def test_a_compiled_step_computes_what_an_uncompiled_one_does(name, policy, options):
    model, options = make(name, layers=2 if policy == "h2o" else 1), dict(options)
    k, room = options.pop("k"), options.pop("room", None)
    want, plain = decode(model, policy, k, ["eager"] * STEPS, **options)
    with torch._dynamo.config.patch(error_on_recompile=True):
        got, cache = decode(model, policy, k, ["compiled"] * STEPS, room=room, **options)
    assert graphs() == 1
    torch.testing.assert_close(got, want, atol=2e-5, rtol=0)
    assert same_tokens(held(cache), held(plain))
    assert cache.get_seq_length() == plain.get_seq_length() == COLUMNS + STEPS


@pytest.mark.slow
def test_256_steps_compile_once():
    model = make("llama_gqa", layers=1)
    with torch._dynamo.config.patch(error_on_recompile=True):
        got, cache = decode(model, "keyformer", 0.5, ["compiled"] * 256)
    assert graphs() == 1 and cache.get_seq_length() == COLUMNS + 256
    want, plain = decode(model, "keyformer", 0.5, ["eager"] * 256)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=0)
    assert same_tokens(held(cache), held(plain))


@pytest.mark.parametrize("policy", slow_but(("keyformer",), ("h2o", "keyformer", "snapkv", "critical(adaptive(roco))")))
def test_compiled_and_uncompiled_steps_take_turns(policy):
    model = make("llama_gqa", layers=1)
    kinds = ["eager", "eager", "compiled", "compiled", "eager", "compiled", "eager", "eager"]
    want, plain = decode(model, policy, 0.4, ["eager"] * len(kinds))
    got, cache = decode(model, policy, 0.4, kinds, room=len(kinds))
    torch.testing.assert_close(got, want, atol=2e-5, rtol=0)
    assert same_tokens(held(cache), held(plain)) and cache.ids.ids_BT.equal(plain.ids.ids_BT)


@pytest.mark.slow
def test_what_is_done_to_a_cache_between_compiled_steps(tmp_path):
    model, ids, more = make("llama_gqa", layers=1), prompt(ROWS, COLUMNS), prompt(ROWS, 9, seed=3)

    def run(compiled):
        with kvpatch.patched(model, "keyformer", 0.5) as patch:
            cache, outs = patch.new_cache(room=20), []
            model(ids, past_key_values=cache)
            step = torch.compile(model.forward, backend="aot_eager") if compiled else model
            for t in range(3):
                step(more[:, t : t + 1], past_key_values=cache)
            patch.save_cache(cache, tmp_path / "cache")
            twin = patch.load_cache(tmp_path / "cache")
            cache.reorder_cache(torch.tensor([1, 0]))
            for one in (cache, twin):
                for t in range(3, 6):
                    outs.append(step(more[:, t : t + 1], past_key_values=one).logits[:, -1])
            outs.append(model(more[:, :4], past_key_values=cache).logits[:, -1])  # a prompt on top
            outs.append(step(more[:, 6:7], past_key_values=cache).logits[:, -1])
            return torch.stack(outs), held(cache), patch.report().seen

    want, got = run(False), run(True)
    torch.testing.assert_close(got[0], want[0], atol=2e-5, rtol=0)
    assert same_tokens(got[1], want[1]) and got[2] == want[2]


def test_what_is_done_to_an_opened_cache():
    """Slots that fill up: a prompt on top of compiled steps, roll-back, more tokens than there was room for."""
    model, ids, more = make("llama_gqa", layers=1), prompt(ROWS, COLUMNS), prompt(ROWS, 14, seed=3)

    def run(room):
        with kvpatch.patched(model, "snapkv", 0.5, window=4) as patch:
            cache, outs = patch.new_cache(room=room), []
            model(ids, past_key_values=cache)
            step = torch.compile(model.forward, fullgraph=True, backend="aot_eager") if room else model
            for t in range(4):
                step(more[:, t : t + 1], past_key_values=cache)
            cache.crop(-2)
            for t in range(2, 8):  # two more than there is room for
                outs.append(model(more[:, t : t + 1], past_key_values=cache).logits[:, -1])
            outs.append(model(more[:, 8:13], past_key_values=cache).logits[:, -1])
            outs.append(model(more[:, 13:14], past_key_values=cache).logits[:, -1])
            return torch.stack(outs), held(cache), cache.nbytes

    want, got = run(None), run(6)
    torch.testing.assert_close(got[0], want[0], atol=2e-5, rtol=0)
    assert same_tokens(got[1], want[1])


def test_a_prompt_on_top_of_a_cache_that_fills_up():
    """Its empty slots lie between the text so far and the new tokens, where a window must not count them."""
    model, ids, more = make("mistral_sliding"), prompt(ROWS, 10), prompt(ROWS, 9, seed=3)

    def run(room):
        with kvpatch.patched(model, "h2o", 22) as patch:
            cache = patch.new_cache(room=room)
            model(ids, past_key_values=cache)
            for t in range(5):
                model(more[:, t : t + 1], past_key_values=cache)
            return model(more[:, 5:], past_key_values=cache).logits

    torch.testing.assert_close(run(12), run(None), atol=2e-5, rtol=0)


@pytest.mark.slow
def test_a_prompt_with_gradients_and_a_loaded_cache_before_compiled_steps(tmp_path):
    """The backend of a step is chosen before it is traced, also for a cache that no prompt of this process filled."""
    model, more = make("llama_gqa", layers=1), prompt(ROWS, 6, seed=3)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    with kvpatch.patched(model, "snapkv", 0.5, window=5) as patch:
        cache = patch.new_cache(room=8)
        with torch.enable_grad():
            model(prompt(ROWS, COLUMNS), past_key_values=cache)
        patch.save_cache(cache, tmp_path / "cache")
        loaded = patch.load_cache(tmp_path / "cache")
        model(more[:, :1], past_key_values=loaded)  # a loaded cache needs one step that is not compiled
        model(more[:, :1], past_key_values=cache)
        step = torch.compile(model.forward, fullgraph=True, backend="eager")
        for t in range(1, 6):
            got, want = (step(more[:, t : t + 1], past_key_values=one).logits for one in (loaded, cache))
            torch.testing.assert_close(got, want, atol=2e-5, rtol=0)


def test_prompts_of_other_lengths_do_not_compile_anew():
    model, more = make("llama_gqa"), prompt(ROWS, 4, seed=3)
    with kvpatch.patched(model, "h2o", 20) as patch, torch._dynamo.config.patch(error_on_recompile=True):
        step = torch.compile(model.forward, fullgraph=True, backend="eager")
        for n in (40, 33, 57):
            cache = patch.new_cache()
            model(prompt(ROWS, n), past_key_values=cache)
            for t in range(4):
                step(more[:, t : t + 1], past_key_values=cache)
    assert graphs() == 1


def test_a_full_cache_says_so():
    model = make("llama_gqa")
    with pytest.raises(RuntimeError, match=r"no free slot.*room"):
        decode(model, "snapkv", 0.5, ["compiled"] * 4, room=3)


def test_the_model_s_positions_run_out_in_words():
    model = make("gpt2")
    model.config.n_positions = COLUMNS + 2
    with pytest.raises(RuntimeError, match="more positions than this model has"):
        decode(model, "h2o", 0.5, ["compiled"] * 4)


@pytest.mark.parametrize("room", [0, -1, True, 2.5])
def test_room_is_a_number_of_tokens(room):
    with kvpatch.patched(make("llama_gqa"), "h2o") as patch, pytest.raises(kvpatch.KVPatchError, match="room="):
        patch.new_cache(room=room)


def test_what_makes_no_graph_says_what_to_do():
    model = make("llama_gqa")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"patch\.new_cache\(room"):
        decode(model, "snapkv", 0.5, ["compiled"])  # grows
    with kvpatch.patched(model, "h2o"), pytest.raises(torch._dynamo.exc.Unsupported, match="Run the prompt uncompiled"):
        torch.compile(model.forward, fullgraph=True, backend="eager")(prompt(1, 20))


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("record", ["export", "trace"])
def test_a_pass_that_is_recorded_has_no_cache(record, use_cache):
    model, ids = make("llama_gqa"), prompt(1, 20)

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids):
            return self.model(ids, use_cache=use_cache).logits

    def run():
        if record == "trace":
            return torch.jit.trace(Logits(), ids)
        return torch.export.export(Logits(), (ids,), strict=False).module()

    with kvpatch.patched(model, "h2o", 8):
        if use_cache:
            with pytest.raises(kvpatch.KVPatchError, match=r"record one pass.*pass use_cache=False, or record"):
                run()
        else:
            torch.testing.assert_close(run()(ids), model(ids).logits)


@pytest.mark.slow
def test_whatever_is_compiled_gives_the_same():
    """Prompts, growing caches and shared scores break the graph and go on outside it."""
    ids, more = prompt(ROWS, COLUMNS), prompt(ROWS, 4, seed=3)

    def run(compiled, name, policy, **options):
        model = make(name, layers=1)
        with kvpatch.patched(model, policy, 0.5, **options) as patch:
            step = torch.compile(model.forward, backend="eager") if compiled else model
            out = step(ids, past_key_values=patch.new_cache(room=4))
            outs = [out.logits[:, -1]]
            for t in range(4):
                out = step(more[:, t : t + 1], past_key_values=out.past_key_values)
                outs.append(out.logits[:, -1])
        return torch.stack(outs)

    for name, policy, options in (
        ("mpt", "snapkv", {"window": 5}),
        ("mpt", "keyformer", {"shared": True}),
        ("llama_gqa", "snapkv", {"positions": "renumbered", "window": 5}),  # its ranks outgrow the rotary table
    ):
        torch._dynamo.reset()
        want, got = (run(compiled, name, policy, **options) for compiled in (False, True))
        torch.testing.assert_close(got, want, atol=2e-5, rtol=0)


@pytest.mark.slow
def test_functions_that_torch_compile_gives_up_on(tmp_path):
    """It then runs them as they stand and compiles what they call: a step must not be half of either kind."""
    model, ids, more = make("llama_gqa", layers=1), prompt(ROWS, COLUMNS), prompt(ROWS, 8, seed=3)

    def run(compiled):
        torch._dynamo.reset()
        outs, step = [], torch.compile(model.forward, backend="eager") if compiled else model
        with kvpatch.patched(model, "snapkv", 0.5, window=5) as patch:
            cache = patch.new_cache(room=20)
            model(ids, past_key_values=cache)
            for t in range(8):
                if t == 2:  # a loaded cache has no clock yet
                    patch.save_cache(cache, tmp_path / "cache")
                    cache = patch.load_cache(tmp_path / "cache")
                if t == 6:
                    cache.activate_past_recording()
                one = model if t in (0, 3) else step
                outs.append(one(more[:, t : t + 1], past_key_values=cache).logits[:, -1])
        return torch.stack(outs), cache.get_seq_length()

    want, got = run(False), run(True)
    torch.testing.assert_close(got[0], want[0], atol=2e-5, rtol=0)
    assert got[1] == want[1]


# ---- generate() ----


def everywhere(**options):
    """generate() compiles on the CPU only when it is told to compile on all devices."""
    config = CompileConfig(**{"fullgraph": True, "backend": "aot_eager", "mode": None} | options)
    config._compile_all_devices = True
    return config


GENERATED = [*itertools.product(("h2o", "full", "critical_adakv", "keyformer"), (False, True))]


@pytest.mark.parametrize(("policy", "padded"), slow_but([("critical_adakv", False), ("keyformer", True)], GENERATED))
def test_generate_compiles(policy, padded):
    model, ids = make("llama_gqa", layers=1), prompt(ROWS, COLUMNS)
    mask = torch.ones_like(ids)
    mask[0, : 5 if padded else 0] = 0
    settings = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    settings["attention_mask"] = mask
    with kvpatch.patched(model, policy, 0.5) as patch:
        want = torch.stack(model.generate(ids, **settings).logits)
        plain = patch.report()
        assert graphs() == 0
        with torch._dynamo.config.patch(error_on_recompile=True):
            for _ in range(2):
                got = torch.stack(model.generate(ids, **settings, compile_config=everywhere()).logits)
                torch.testing.assert_close(got, want, atol=2e-5, rtol=0)
        assert graphs() == 1
        report = patch.report()
        assert (report.seen, report.held().tolist()) == (plain.seen, plain.held().tolist())
    assert not [name for name in vars(model) if "compile" in name]
    assert "create_masks_for_generate" not in vars(model)


def test_generate_compiles_only_when_asked():
    model, ids = make("llama_gqa"), prompt(1, COLUMNS)
    with kvpatch.patched(model, "h2o", 0.5):
        out = model.generate(ids, max_new_tokens=4, return_dict_in_generate=True)
        assert not out.past_key_values.is_compileable
        model.generate(ids, max_new_tokens=4, compile_config=everywhere(), disable_compile=True)
        with pytest.raises(kvpatch.KVPatchError, match="compile_config"):
            model.generate(ids, max_new_tokens=4, cache_implementation="static")
    assert graphs() == 0


# ---- nothing is read from the device ----

READS = {"aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::nonzero", "aten::equal", "aten::masked_select"}


def asserting(event):
    while event is not None and event.name != "aten::_assert_async":
        event = event.cpu_parent
    return event is not None


@pytest.mark.parametrize("kind", ["eager", "compiled"])
@pytest.mark.parametrize("policy", ["h2o", "roco", "keyformer", "tova", "snapkv", "full"])
def test_a_step_reads_nothing_back(policy, kind, monkeypatch):
    for module in (checks, inputs):
        monkeypatch.setattr(module, "at_hand", lambda tensor: False)  # as on a device, where inputs are not looked at
    model, more = make("llama_gqa", layers=1), prompt(ROWS, 4, seed=3)
    with kvpatch.patched(model, policy, 0.5) as patch:
        cache = patch.new_cache(room=4)
        model(prompt(ROWS, COLUMNS), past_key_values=cache)
        step = torch.compile(model.forward, fullgraph=True, backend="aot_eager") if kind == "compiled" else model
        step(more[:, :1], past_key_values=cache)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for t in (1, 2):
                step(more[:, t : t + 1], past_key_values=cache)
    names = {event.name for event in profiler.events()}
    assert "aten::argmin" in names or policy in ("snapkv", "full")
    # the CPU's _assert_async reads its condition; a GPU's does not
    assert not [event.name for event in profiler.events() if event.name in READS and not asserting(event)]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None and "CXX" not in os.environ, reason="torch's inductor needs a C++ compiler")
def test_by_inductor():
    model = make("llama_gqa", layers=1)
    want, plain = decode(model, "roco", 0.5, ["eager"] * 6)
    with torch._dynamo.config.patch(error_on_recompile=True):
        got, cache = decode(model, "roco", 0.5, ["compiled"] * 6, backend="inductor")
    torch.testing.assert_close(got, want, atol=2e-5, rtol=0)
    assert same_tokens(held(cache), held(plain))


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["h2o", "keyformer", "adakv"])
def test_cuda_graphs(policy):
    model, ids = make("llama_gqa").cuda(), prompt(ROWS, COLUMNS).cuda()
    settings = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    with kvpatch.patched(model, policy, 0.5):
        want = torch.stack(model.generate(ids, **settings).logits)
        got = torch.stack(model.generate(ids, **settings, compile_config=CompileConfig(mode="reduce-overhead")).logits)
    torch.testing.assert_close(got, want, atol=1e-3, rtol=0)
    assert not counters["inductor"]["cudagraph_skips"]


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["h2o", "roco", "keyformer", "snapkv"])
def test_a_step_never_waits_for_the_gpu(policy):
    model, more = make("llama_gqa").cuda(), prompt(ROWS, 4, seed=3).cuda()
    with kvpatch.patched(model, policy, 0.5) as patch:
        cache = patch.new_cache(room=4)
        model(prompt(ROWS, COLUMNS).cuda(), past_key_values=cache)
        model(more[:, :1], past_key_values=cache)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for t in (1, 2):
                model(more[:, t : t + 1], past_key_values=cache)
        finally:
            torch.cuda.set_sync_debug_mode("default")


WHY_NOT = {
    "other processes": lambda cache: setattr(cache, "settings", replace(cache.settings, parallel=Parallel(2))),
    "strict": lambda cache: setattr(cache, "settings", replace(cache.settings, strict=("0", "1"))),
    "a prompt is open": lambda cache: setattr(cache.turns, "unfinished", True),
    "unfinished": lambda cache: cache.begin_change("forward pass"),
    "no tensors yet": lambda cache: setattr(cache.counters, "tensors_or_none", None),
    "steps are recorded": lambda cache: cache.activate_past_recording(),
    "one layer records": lambda cache: setattr(cache.layers[1], "record_past", True),
    "columns": lambda cache: setattr(cache.layers[1], "mode", Appending()),
    "no slot left": lambda cache: setattr(cache.layers[1], "mode", Growing(cache.layers[1].mode.free_BH, slack=0)),
    "buffers will move": lambda cache: setattr(cache.layers[1].mode, "has_short_heads", True),
}


@pytest.mark.parametrize("why", WHY_NOT)
def test_a_step_is_traced_unless_something_is_in_its_way(why):
    cache = read(make("llama_gqa"), "h2o", 0.5, steps=1)
    assert can_trace(cache, ROWS, 1)
    assert not can_trace(cache, ROWS, 2)
    assert not can_trace(cache, ROWS + 1, 1)
    WHY_NOT[why](cache)
    assert not can_trace(cache, ROWS, 1)


def test_a_step_with_renumbered_positions_is_traced_once_its_table_is_there():
    cache = read(make("llama_gqa"), "h2o", 0.5, steps=1, positions="renumbered")
    assert can_trace(cache, ROWS, 1)
    cache.layers[1].mode.steps_until_full = 1
    assert not can_trace(cache, ROWS, 1)
    cache.layers[1].mode.steps_until_full, cache.rotary = 0, None
    assert not can_trace(cache, ROWS, 1)


def test_layers_that_share_a_score_are_not_traced():
    cache = read(make("llama_gqa"), "keyformer", 0.5, steps=1, shared=True)
    assert not can_trace(cache, ROWS, 1)
