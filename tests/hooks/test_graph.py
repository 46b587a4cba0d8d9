"""Decode steps as graphs: replayed over many tokens, prompts and evictions they are the model's own steps."""

import gc
import sys
import weakref

import pytest
import torch
from transformers import LlamaForCausalLM

import kvpatch
from kvpatch import KVPatchError
from kvpatch.hooks import graph as graphs
from kvpatch.hooks.graph import StepGraph
from tests.helpers.comparing import same_tokens
from tests.helpers.marks import slow_but
from tests.helpers.recording import FakeRecorder
from tests.helpers.tiny import left_pad, make, prompt

pytestmark = pytest.mark.usefixtures("no_gradients")
STEPS = 8


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch):
    """Values of tensors are not at hand there."""
    for module in [module for name, module in sys.modules.items() if name.startswith("kvpatch") and hasattr(module, "at_hand")]:
        monkeypatch.setattr(module, "at_hand", lambda tensor: False)


def held(cache):
    return [cache.positions(layer).sort(-1).values for layer in range(len(cache.layers))]


def steps(patch, model, lengths, room, graph=None, pads=False, seed=0):
    """Logits and positions of a text per length of a prompt, whose tokens go through the model or a graph."""
    outs, kept = [], []
    for turn, n in enumerate(lengths):
        ids, more, cache = prompt(2, n, seed=seed + turn), prompt(2, STEPS, seed=50 + turn), patch.new_cache(room=room)
        mask = left_pad(ids, [n, n - 7]) if pads else None
        outs.append(model(ids, past_key_values=cache, attention_mask=mask).logits[:, -1:])
        for t in range(STEPS):
            new = more[:, t : t + 1]
            logits = model(new, past_key_values=cache).logits if graph is None else graph(new, cache)
            outs.append(logits.clone())
        kept += held(cache)
        assert cache.get_seq_length() == n + STEPS
    return torch.cat(outs, 1), kept


CASES = [
    ("llama_gqa", "h2o", {"k": 9}),
    ("llama_gqa", "keyformer", {"k": 9, "tau": (1.0, 3.0), "generation_length": 6}),
    ("llama_gqa", "snapkv", {"k": 12, "window": 4, "room": STEPS}),
    ("llama_gqa", "roco", {"k": 9}),
    ("gpt2", "scissorhands", {"k": 9}),
    ("mpt", "tova", {"k": 9}),
    ("gptj", "h2o", {"k": 9, "bits": 8}),
    ("llama_gqa", "streaming_llm", {"k": 9, "bits": 4}),
    ("llama_gqa", "critical(h2o)", {"k": 9}),
    ("mistral_sliding", "h2o", {"k": 9}),
    ("llama_gqa", "full", {"k": 1.0, "room": STEPS}),
    ("llama_gqa", "random", {"k": 9}),
]


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize(("name", "policy", "options"), slow_but(CASES[:3], CASES), ids=str)
def test_replayed_steps_are_the_model_s(name, policy, options, pads):
    """Three prompts of one length: one capture, in the memory of which the later caches live."""
    replays(name, policy, options, pads)


def replays(name, policy, options, pads=False, prompts=3, layers=2):
    """The graph and the model, over several prompts; returns the report."""
    model, options = make(name, layers=layers), dict(options)
    room, k = options.pop("room", None), options.pop("k")
    with kvpatch.patched(model, policy, k, **options) as patch:
        want, kept = steps(patch, model, [24] * prompts, room, pads=pads)
        graph = StepGraph(model, patch._state, FakeRecorder)
        got, found = steps(patch, model, [24] * prompts, room, graph, pads=pads)
        report = patch.report()
    torch.testing.assert_close(got, want, atol=2e-5, rtol=0)
    assert same_tokens(found, kept)
    assert graph.captures == 1 and graph.replays == prompts * STEPS - 1
    return report


def test_caches_in_turns_and_steps_of_the_model_in_between():
    """Whoever leaves the graph's memory gets memory of its own."""
    model = make("llama_gqa")
    texts, more = [prompt(2, 24, seed=seed) for seed in (1, 2)], prompt(2, STEPS, seed=9)
    with kvpatch.patched(model, "h2o", 9) as patch:
        found = []
        for graph in (None, StepGraph(model, patch._state, FakeRecorder)):
            caches, outs = [patch.new_cache() for _ in texts], []
            for ids, cache in zip(texts, caches, strict=True):
                model(ids, past_key_values=cache)
            for t in range(STEPS):
                new = more[:, t : t + 1]
                for cache in caches:
                    by_model = graph is None or t == 4
                    outs.append((model(new, past_key_values=cache).logits if by_model else graph(new, cache)).clone())
                if t == 5:
                    caches[0] = caches[0].clone()
            for cache in caches:
                cache.check_invariants()
            found.append((torch.cat(outs, 1), [one for cache in caches for one in held(cache)]))
    torch.testing.assert_close(found[1][0], found[0][0], atol=2e-5, rtol=0)
    assert same_tokens(found[1][1], found[0][1]) and graph.captures == 1


def test_two_graphs_may_take_turns_over_one_cache():
    """Each has memory of its own, since each was captured over another cache."""
    model, more, found = make("llama_gqa"), prompt(2, 12, seed=9), []
    with kvpatch.patched(model, "h2o", 9) as patch:
        for graphs_of in ((model, model), tuple(StepGraph(model, patch._state, FakeRecorder) for _ in range(2))):
            for step in graphs_of:
                other = patch.new_cache()
                model(prompt(2, 24, seed=3), past_key_values=other)
                for _ in range(2):
                    step(prompt(2, 1), **{"past_key_values" if step is model else "cache": other})
            cache, outs = patch.new_cache(), []
            model(prompt(2, 24), past_key_values=cache)
            for t in range(12):
                step, new = graphs_of[t // 2 % 2], more[:, t : t + 1]
                outs.append((step(new, past_key_values=cache).logits if step is model else step(new, cache)).clone())
            found.append(torch.cat(outs, 1))
    torch.testing.assert_close(found[1], found[0], atol=2e-5, rtol=0)


def test_a_graph_of_an_earlier_turn_is_not_gone_on_with():
    """A step of the second turn is traced in slots of another number; the first turn's graph has steps left."""
    model, more, found = make("llama_gqa", dtype=torch.float64), prompt(1, 20, seed=9), []
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        for graph in (None, StepGraph(model, patch._state, FakeRecorder)):
            cache, outs = patch.new_cache(), []
            model(prompt(1, 22), past_key_values=cache)
            for t in range(20):
                if t == 10:
                    model(prompt(1, 2, seed=4), past_key_values=cache)
                new = more[:, t : t + 1]
                outs.append((model(new, past_key_values=cache).logits if graph is None else graph(new, cache)).clone())
            cache.check_invariants()
            found.append(torch.cat(outs, 1))
    torch.testing.assert_close(found[1], found[0], atol=1e-12, rtol=0)
    assert graph.captures == 2 and graph.replays > 9


def test_other_shapes_get_a_graph_of_their_own():
    model, runs = make("llama_gqa"), [(24, 9), (40, 9)]
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        lengths = [n for n, _ in runs] * 2
        want, _ = steps(patch, model, lengths, None)
        graph = StepGraph(model, patch._state, FakeRecorder)
        got, _ = steps(patch, model, lengths, None, graph)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=0)
    assert graph.captures == 2


def test_a_bounded_number_of_graphs_and_caches_stays(monkeypatch):
    """Under a share of the prompt each class of lengths (test_capacity.py) is a kind of its own."""
    model, alive, kinds = make("llama_gqa"), [], 4
    monkeypatch.setattr(graphs, "KINDS", kinds)
    lengths = range(24, 24 + 16 * (kinds + 3), 16)
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        graph = StepGraph(model, patch._state, FakeRecorder)
        for n in [*lengths, lengths[-1], lengths[0]]:
            cache = patch.new_cache()
            model(prompt(1, n), past_key_values=cache)
            want = model(prompt(1, 1), past_key_values=cache.clone()).logits
            for turn in range(3):
                logits = graph(prompt(1, 1), cache)
                if turn == 0:
                    torch.testing.assert_close(logits, want, atol=2e-5, rtol=0)
            alive.append(weakref.ref(cache.layers[0].kv.keys))
            del cache
            gc.collect()
    assert graph.captures == len(lengths) + 1, "the newest kind was kept, the oldest was not"
    assert sum(keys() is not None for keys in alive[:-2]) <= kinds


def test_graphs_are_bounded_in_bytes():
    """Of graphs whose caches take more, those used longest ago go; the one in use stays, whatever it takes."""
    model, lengths, sizes = make("llama_gqa"), (24, 40, 56, 72), []
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        for kept in (4, 3, 2, 1):
            graph = StepGraph(model, patch._state, FakeRecorder, limit=sum(sizes[-kept:]) if kept > 1 else 0)
            graph.limit = graph.limit if sizes else sys.maxsize
            for n in lengths:
                cache = patch.new_cache()
                model(prompt(1, n), past_key_values=cache)
                for _ in range(2):
                    graph(prompt(1, 1), cache)
            sizes = sizes or [one.nbytes for one in graph._known.values()]
            assert graph.captures == 4 and [one.nbytes for one in graph._known.values()] == sizes[-kept:]
            assert graph.nbytes == sum(sizes[-kept:]) >= cache.nbytes
        graph.drop()
        assert graph.nbytes == 0 and cache.get_seq_length() == lengths[-1] + 2


def test_a_failed_capture_leaves_the_step_to_the_model(caplog):
    """Dynamic RoPE reads the largest position on the host, which no capture may."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    tiny = make("llama_gqa").config
    config = type(tiny)(**{**tiny.to_dict(), "rope_parameters": rope})
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with kvpatch.patched(model, "h2o", 9) as patch:
        want, kept = steps(patch, model, [24, 24], None)
        graph = StepGraph(model, patch._state, FakeRecorder)
        with caplog.at_level("WARNING", logger="kvpatch"):
            got, found = steps(patch, model, [24, 24], None, graph)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=0)
    assert same_tokens(found, kept) and graph.captures == graph.replays == 0
    (warning,) = [one.message for one in caplog.records if "can be captured" in one.message]
    assert "not permitted when stream is capturing" in warning


def test_a_model_on_several_devices_is_refused():
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 9) as patch:
        model.lm_head = torch.nn.Linear(4, 4, device="meta")
        with pytest.raises(KVPatchError, match="a graph is of one device, but this model is on cpu, meta"):
            patch.graph(model)


def test_autocast_calls_the_model():
    """A capture would keep the casts of weights that it finds; also in the middle of replayed steps."""
    model, more = make("llama_gqa"), prompt(1, 6, seed=9)
    with kvpatch.patched(model, "h2o", 9) as patch:
        graph, outs = StepGraph(model, patch._state, FakeRecorder), []
        for step in (model, graph):
            cache = patch.new_cache()
            model(prompt(1, 24), past_key_values=cache)
            for t in range(6):
                with torch.autocast("cpu", torch.bfloat16, enabled=t == 4):
                    new = more[:, t : t + 1]
                    outs.append((model(new, past_key_values=cache).logits if step is model else graph(new, cache)).clone())
    torch.testing.assert_close(torch.stack(outs[6:]), torch.stack(outs[:6]), atol=2e-5, rtol=0)
    assert graph.replays == 4


@pytest.mark.parametrize(("policy", "options"), [("snapkv", {}), ("streaming_llm", {"positions": "renumbered"})], ids=str)
def test_what_cannot_be_captured_is_a_call_of_the_model(policy, options):
    """Buffers that will move, keys that turn."""
    model = make("llama_gqa")
    with kvpatch.patched(model, policy, 9, **options) as patch:
        want, _ = steps(patch, model, [24], None)
        graph = StepGraph(model, patch._state, FakeRecorder)
        got, _ = steps(patch, model, [24], None, graph)
    assert graph.captures == 0 and torch.equal(got, want)


@pytest.mark.parametrize(("name", "policy", "k", "room"), [("llama_gqa", "snapkv", 12, 4), ("gpt2", "h2o", 40, 5)], ids=str)
def test_steps_beyond_the_room_are_calls_of_the_model(name, policy, k, room):
    """No graph writes behind the last slot; buffers that have grown get a graph of their own."""
    model = make(name)
    with kvpatch.patched(model, policy, k) as patch:
        want, kept = steps(patch, model, [24] * 2, room)
        graph = StepGraph(model, patch._state, FakeRecorder)
        got, found = steps(patch, model, [24] * 2, room, graph)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=0)
    assert same_tokens(found, kept) and 0 < graph.replays < 2 * STEPS - 1


def test_the_last_position_is_an_error_of_the_model_s_call():
    """Which says what to do, before a graph could do harm."""
    model = make("gpt2")
    most = model.config.n_positions
    with kvpatch.patched(model, "h2o", 9) as patch:
        graph, cache = StepGraph(model, patch._state, FakeRecorder), patch.new_cache()
        model(prompt(1, most - 4), past_key_values=cache)
        for _ in range(4):
            graph(prompt(1, 1), cache)
        with pytest.raises(KVPatchError, match="positions, but this model has"):
            graph(prompt(1, 1), cache)
    assert graph.replays == 3


def test_a_value_read_while_a_step_is_captured_is_refused(monkeypatch, caplog):
    """As on a device: the recorder that stands for it lets no Python decision depend on data."""
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 9) as patch:
        graph, cache = StepGraph(model, patch._state, FakeRecorder), patch.new_cache()
        model(prompt(1, 24), past_key_values=cache)
        graph(prompt(1, 1), cache)

        def reads(input_ids, **call):
            return model(input_ids=input_ids * min(int(input_ids.max()), 1), **call)

        monkeypatch.setattr(graph, "model", reads)
        graph(prompt(1, 1), cache)
    assert graph.captures == 0
    assert any("not permitted when stream is capturing" in one.message for one in caplog.records)


def test_without_a_gpu_the_error_says_what_to_do():
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 9) as patch, pytest.raises(KVPatchError, match="no CUDA device.*torch.compile"):
        patch.graph(model)


def test_another_patch_s_cache_is_refused():
    model, other = make("llama_gqa"), make("llama_gqa")
    with kvpatch.patched(model, "h2o", 9) as patch, kvpatch.patched(other, "h2o", 5) as elsewhere:
        cache = elsewhere.new_cache()
        other(prompt(1, 24), past_key_values=cache)
        with pytest.raises(KVPatchError, match="another patch"):
            StepGraph(model, patch._state, FakeRecorder)(prompt(1, 1), cache)
