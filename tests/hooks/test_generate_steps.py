"""generate() runs its steps by graphs: the tokens, caches and errors are those of the model's own steps.

A recorder that repeats operations (tests/helpers/recording.py) stands for CUDA's graphs.
"""

import copy
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaForCausalLM, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import kvpatch
from kvpatch import KVPatchError
from kvpatch.arch.upstream import CACHE, cache_of
from kvpatch.cache import counters
from kvpatch.hooks import generate_steps
from tests.helpers.comparing import same_tokens
from tests.helpers.marks import since, slow_but
from tests.helpers.recording import FakeRecorder
from tests.helpers.tiny import left_pad, make, prompt, snapshot
from tests.hooks.test_graph import _as_on_a_device  # noqa: F401

NEW = 10
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def ran(monkeypatch):
    """What recorders did."""
    seen = SimpleNamespace(captures=0, replays=0)

    class Recorder(FakeRecorder):
        def capture(self, run):
            super().capture(run)
            seen.captures += 1

        def replay(self):
            seen.replays += 1
            super().replay()

    monkeypatch.setitem(generate_steps.RECORDERS, "cpu", Recorder)
    return seen


def without(model, policy, k=0.5, **options):
    return kvpatch.patched(model, policy, k, graphs=False, **options)


def told(model, patched, ids, more=None, **options):
    """Tokens of two texts one after the other, and the positions that each leaves."""
    texts, held = [], []
    with patched as patch:
        for turn in range(2):
            torch.manual_seed(7)
            texts.append(model.generate(torch.cat([ids[turn:], ids[:turn]]), **GREEDY | options, **(more or {})))
            held += [one.sort(-1).values for one in patch.report().positions]
    return texts, held


def compare(model, policy, ran, ids, replays, settings, **options):
    """Generate with and without graphs."""
    settings = dict(settings)
    k = settings.pop("k", 0.5)
    want, kept = told(model, without(model, policy, k, **settings), ids, **options)
    assert ran.captures == ran.replays == 0
    got, found = told(model, kvpatch.patched(model, policy, k, **settings), ids, **options)
    assert all(map(torch.equal, got, want)) and same_tokens(found, kept)
    assert ran.replays == replays and ran.captures == (replays > 0)


CASES = [
    ("llama_gqa", "h2o", {}),
    ("llama_gqa", "keyformer", {"tau": (1.0, 3.0)}),
    ("gpt2", "tova", {}),
    ("llama_gqa", "roco", {}),
    ("mistral_sliding", "h2o", {}),
    ("mpt", "scissorhands", {}),
    ("gptj", "h2o", {"bits": 8}),
    ("llama_gqa", "critical(h2o)", {}),
]
WAYS = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 1.5, "top_k": 30},
    "padding": {"attention_mask": left_pad(prompt(2, 24), [24, 15])},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "policy", "settings"), slow_but(CASES[:2], CASES), ids=str)
def test_tokens_are_those_of_the_model_s_steps(name, policy, settings, way, ran):
    """The first step of the first text is traced, all others are replayed."""
    compare(make(name), policy, ran, prompt(2, 24), 2 * (NEW - 1) - 1, settings, **WAYS[way])


def test_no_cache_argument_is_needed_and_a_budget_in_tokens_serves_every_length(ran):
    model = make("llama_gqa")
    texts = [prompt(1, n) for n in (24, 31, 50)]
    with without(model, "h2o", 12):
        want = [model.generate(ids, **GREEDY) for ids in texts]
    with kvpatch.patched(model, "h2o", 12):
        got = [model.generate(ids, **GREEDY) for ids in texts]
    assert all(map(torch.equal, got, want)) and ran.captures == 1


class Collects(BaseStreamer):
    def __init__(self, at=None, act=None):
        self.seen, self.at, self.act = [], at, act

    def put(self, value):
        self.seen += value.flatten().tolist()
        if len(self.seen) == self.at:
            self.act()

    def end(self):
        pass


class StopsAfter(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def test_streamers_and_stopping_criteria(ran):
    model, ids, found = make("llama_gqa"), prompt(1, 24), []
    for patched in (without(model, "h2o"), kvpatch.patched(model, "h2o")):
        streamer = Collects()
        with patched:
            out = model.generate(ids, streamer=streamer, stopping_criteria=[StopsAfter(30)], **GREEDY)
        assert streamer.seen == out[0].tolist() and out.shape[1] == 30
        found.append(streamer.seen)
    assert found[0] == found[1] and ran.replays == 4


def test_scores_are_not_overwritten_by_later_steps(ran):
    model, ids = make("llama_gqa"), prompt(2, 24)
    asked = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    with without(model, "h2o"):
        want = model.generate(ids, **GREEDY, **asked)
    with kvpatch.patched(model, "h2o"):
        got = model.generate(ids, **GREEDY, **asked)
    for name in ("logits", "scores"):
        torch.testing.assert_close(torch.stack(got[name]), torch.stack(want[name]), atol=2e-5, rtol=0)
    assert ran.replays == NEW - 2


def test_a_step_is_what_its_call_asks_for(ran):
    """generate()'s call of the model, by hand: places of the caller's own, further outputs, and logits that are kept."""
    model, ids, more = make("llama_gqa"), prompt(1, 24), prompt(1, 6, seed=2)
    found = []
    with kvpatch.patched(model, "h2o", 0.5) as patch, torch.no_grad():
        for steps in (SimpleNamespace(with_graphs=lambda *_: nullcontext()), generate_steps.GenerateSteps(patch._state)):
            cache = patch.new_cache()
            model(ids, past_key_values=cache)
            with steps.with_graphs(model, cache):
                for t in range(6):
                    call = {CACHE: cache, "position_ids": torch.tensor([[27 + t]]), "use_cache": True}
                    out = model.__call__(input_ids=more[:, t : t + 1], output_hidden_states=t == 4, **call)
                    assert cache_of(out) is cache and (out.hidden_states is None) == (t != 4)
                    found.append(out.logits)
    torch.testing.assert_close(torch.stack(found[6:]), torch.stack(found[:6]), atol=2e-5, rtol=0)
    assert ran.replays == 4


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 3},
        {"output_hidden_states": True, "return_dict_in_generate": True},
        {"position_ids": torch.arange(24)[None] + 3},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_needs_more_than_the_next_token_s_logits_calls_the_model(options, ran):
    model, ids = make("llama_gqa"), prompt(1, 24)
    with without(model, "h2o"):
        want = model.generate(ids, **GREEDY, **options)
    with kvpatch.patched(model, "h2o"):
        got = model.generate(ids, **GREEDY, **options)
    texts = [getattr(out, "sequences", out) for out in (got, want)]
    assert torch.equal(*texts) and ran.captures == ran.replays == 0
    if "output_hidden_states" in options:
        assert len(got.hidden_states) == NEW


@pytest.mark.parametrize(
    ("policy", "settings"),
    [("snapkv", {}), ("h2o", {"record": True}), ("h2o", {"strict": True}), ("full", {"k": 1.0})],
    ids=str,
)
def test_what_cannot_be_traced_calls_the_model(policy, settings, ran):
    compare(make("llama_gqa"), policy, ran, prompt(2, 40), 0, settings)


def test_caches_that_are_handed_out_are_their_callers(ran, tmp_path):
    """The next text takes their place in the graph's memory; they go on, are saved and loaded, and are as without graphs."""
    model, ids, found = make("llama_gqa"), prompt(1, 24), []
    for patched in (without(model, "h2o"), kvpatch.patched(model, "h2o")):
        with patched as patch:
            first = model.generate(ids, return_dict_in_generate=True, **GREEDY)
            cache = cache_of(first)
            saved = tmp_path / "cache.safetensors"
            patch.save_cache(cache, saved)
            held = [cache.positions(layer).clone() for layer in range(2)]
            other = model.generate(prompt(1, 24, seed=5), **GREEDY)
            assert all(torch.equal(cache.positions(layer), held[layer]) for layer in range(2))
            cache.check_invariants()
            question = torch.cat([first.sequences, prompt(1, 6, seed=6)], 1)
            loaded = patch.load_cache(saved)
            turns = [model.generate(question, past_key_values=one, **GREEDY) for one in (cache.clone(), loaded, cache)]
        assert torch.equal(turns[0], turns[1]) and torch.equal(turns[0], turns[2])
        found += [first.sequences, other, turns[0]]
    assert all(map(torch.equal, found[:3], found[3:])) and ran.replays > 0


@since("5.24", "a later prompt is read in pieces with a mask of too few columns")
def test_a_piece_of_a_prompt_is_no_step(ran):
    """In pieces, generate() reads a prompt by the call of its steps; the last piece of each turn is one token."""
    model, ids, found, held = make("llama_gqa"), prompt(1, 22), [], []
    for patched in (without(model, "h2o"), kvpatch.patched(model, "h2o")):
        with patched as patch:
            cache = patch.new_cache()
            asked = {"past_key_values": cache, "prefill_chunk_size": 7, **GREEDY}
            text = model.generate(ids, **asked)
            found += [text, model.generate(text, **asked)]
            assert cache.turns.prompts_read == 2
            held.append([cache.positions(layer).sort(-1).values for layer in (0, 1)])
    assert all(map(torch.equal, found[:2], found[2:])) and same_tokens(*held) and ran.replays > 0


def test_nothing_stays_on_the_model(ran):
    model, ids = make("llama_gqa"), prompt(1, 24)
    before = snapshot(model)
    with kvpatch.patched(model, "h2o"):
        model.generate(ids, **GREEDY)
        assert "__call__" not in vars(model) and ran.captures == 1
        with pytest.raises(ZeroDivisionError):
            model.generate(ids, streamer=Collects(28, lambda: 1 / 0), **GREEDY)
        assert "__call__" not in vars(model)
        after = model.generate(ids, **GREEDY)
    assert snapshot(model) == before
    with without(model, "h2o"):
        assert torch.equal(model.generate(ids, **GREEDY), after)


def _swap(model):
    model.model.layers[0].mlp = make("llama_gqa", seed=3).model.layers[0].mlp


def _scale(model):
    model.model.layers[1].self_attn.scaling *= 3


def _add(model):
    with torch.no_grad():
        model.lm_head.weight.add_(torch.linspace(0, 3, 97)[:, None])


@pytest.mark.parametrize("change", [_swap, _scale, _add], ids=lambda change: change.__name__)
def test_a_model_that_has_changed_is_captured_anew(change, ran):
    """Numbers in place are read by the graph as they are; other modules and Python's numbers are not."""
    ids, found = prompt(1, 24), []
    for patch in (without, kvpatch.patched):
        model = make("llama_gqa")
        with patch(model, "h2o", 0.5):
            before = model.generate(ids, **GREEDY)
            change(model)
            found.append(model.generate(ids, **GREEDY))
        assert not torch.equal(before, found[-1])
    assert torch.equal(*found) and ran.captures == (1 if change is _add else 2)


class Own(LlamaForCausalLM):
    """Code of its own may do anything, such as count."""

    def forward(self, *args, **kwargs):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(*args, **kwargs)


def _hooked(model):
    model.calls = 0
    model.model.layers[0].mlp.register_forward_hook(lambda *_: setattr(model, "calls", model.calls + 1))


def _replaced(model):
    norm, model.calls = model.model.norm, 0
    forward = norm.forward

    def counts(hidden):
        model.calls += 1
        return forward(hidden)

    norm.forward = counts


def _subclassed(model):
    model.__class__ = Own


@pytest.mark.parametrize("change", [_hooked, _replaced, _subclassed], ids=lambda change: change.__name__)
def test_code_of_the_user_s_runs_for_every_token(change, ran):
    model = make("llama_gqa")
    change(model)
    with kvpatch.patched(model, "h2o"):
        model.generate(prompt(1, 24), **GREEDY)
    assert model.calls == NEW and ran.captures == 0


def test_autocast_and_dispatch_modes_call_the_model(ran):
    model, ids = make("llama_gqa"), prompt(1, 24)

    class Counts(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    for mode in (torch.autocast("cpu", dtype=torch.bfloat16), Counts()):
        with kvpatch.patched(model, "h2o"), mode:
            model.generate(ids, **GREEDY)
    assert ran.captures == 0


@pytest.mark.parametrize("asked", [False, True])
def test_the_switch(asked, ran):
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", graphs=asked):
        model.generate(prompt(1, 24), **GREEDY)
    assert (ran.captures > 0) == asked
    with pytest.raises(KVPatchError, match="graphs=1 must be True or False"):
        kvpatch.patch(model, "h2o", graphs=1)


def test_a_second_generate_beside_the_first_calls_the_model(ran):
    """In another thread, in the middle of the first one's text."""
    model, ids, other = make("llama_gqa"), prompt(1, 24), prompt(1, 24, seed=4)
    with without(model, "h2o"):
        want = [model.generate(one, **GREEDY) for one in (ids, other)]
    got = {}
    with kvpatch.patched(model, "h2o"):

        def beside():
            thread = threading.Thread(target=lambda: got.update(other=model.generate(other, **GREEDY)))
            thread.start()
            thread.join()

        got["ids"] = model.generate(ids, streamer=Collects(28, beside), **GREEDY)
    assert torch.equal(got["ids"], want[0]) and torch.equal(got["other"], want[1])
    assert ran.captures == 1 and ran.replays == NEW - 2, "the first one's alone"


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_what_is_kept_between_texts_is_bounded_in_bytes(limit, ran, monkeypatch):
    monkeypatch.setattr(generate_steps, "find_limit", lambda device: limit)
    model, ids = make("llama_gqa"), prompt(1, 24)
    with kvpatch.patched(model, "h2o"):
        texts = [model.generate(ids, **GREEDY) for _ in range(3)]
    assert torch.equal(texts[0], texts[2]) and ran.captures == (1 if limit else 3)


def test_ids_of_a_long_text_are_known(ran, monkeypatch):
    """The tape of a graph's steps is read before it is full."""
    monkeypatch.setattr(counters, "TAPE", 8)
    model, ids = make("llama_gqa"), prompt(1, 24)
    with kvpatch.patched(model, "h2o") as patch:
        cache = patch.new_cache()
        text = model.generate(ids, past_key_values=cache, **GREEDY | {"max_new_tokens": 30})
        text[0, 30] += 1
        with pytest.raises(KVPatchError, match="at column 30 of row 0"):
            model.generate(torch.cat([text, prompt(1, 3)], 1), past_key_values=cache, **GREEDY)
    assert ran.captures == 1 and ran.replays == 28


def test_an_interrupted_trace_leaves_no_usable_cache(ran, monkeypatch):
    model, ids = make("llama_gqa"), prompt(1, 24)
    with kvpatch.patched(model, "h2o") as patch:
        cache, run = patch.new_cache(), generate_steps.GenerateSteps._run_model

        def interrupted(*args, **kwargs):
            run(*args, **kwargs)
            raise KeyboardInterrupt

        monkeypatch.setattr(generate_steps.GenerateSteps, "_run_model", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.generate(ids, past_key_values=cache, **GREEDY)
        with pytest.raises(KVPatchError, match="step for a graph of this cache did not finish"):
            model.generate(ids, past_key_values=cache, **GREEDY)


def test_the_report_has_times_and_passes(ran):
    model, ids = make("llama_gqa"), prompt(1, 24)
    with kvpatch.patched(model, "h2o") as patch:
        for turn in (1, 2):
            model.generate(ids, **GREEDY)
            assert patch.report().passes == {"prompt": (turn, 0), "decode": (turn * (NEW - 1), turn * (NEW - 1))}
            assert {"first_token", "per_token"} <= patch.report().seconds.keys()
    assert ran.captures == 1


def test_a_failed_capture_leaves_all_steps_to_the_model(ran, caplog, monkeypatch):
    def fails(self, run):
        raise RuntimeError("no graph today")

    monkeypatch.setattr(FakeRecorder, "capture", fails)
    with caplog.at_level("WARNING", logger="kvpatch"):
        compare(make("llama_gqa"), "h2o", ran, prompt(2, 24), 0, {})
    assert len([one for one in caplog.records if "no graph today" in one.message]) == 1


def test_a_copy_of_the_model_has_graphs_of_its_own(ran):
    model, ids = make("llama_gqa"), prompt(1, 24)
    with kvpatch.patched(model, "h2o"):
        want = model.generate(ids, **GREEDY)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.lm_head.weight.mul_(-1)
        assert not torch.equal(twin.generate(ids, **GREEDY), want)
        assert torch.equal(model.generate(ids, **GREEDY), want)
    assert ran.captures == 3


def test_each_adapter_has_a_graph_of_its_own(ran):
    peft = pytest.importorskip("peft")
    low_rank = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model, ids, found = peft.get_peft_model(make("llama_gqa"), low_rank), prompt(1, 24), []
    model.add_adapter("two", low_rank)
    for graphs in (False, True):
        with kvpatch.patched(model, "h2o", 0.5, graphs=graphs):
            for name in ("default", "two"):
                model.set_adapter(name)
                model.eval()
                found.append(model.generate(input_ids=ids, **GREEDY))
            with model.disable_adapter():
                found.append(model.generate(input_ids=ids, **GREEDY))
    assert all(map(torch.equal, found[3:], found[:3])) and not torch.equal(found[0], found[1])
    assert ran.captures == 3


def test_hooks_that_place_a_model_on_one_device_are_no_obstacle(ran):
    accelerate = pytest.importorskip("accelerate")
    model, ids = make("llama_gqa"), prompt(1, 24)
    with kvpatch.patched(model, "h2o"):
        want = model.generate(ids, **GREEDY)
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    with kvpatch.patched(model, "h2o"):
        assert torch.equal(model.generate(ids, **GREEDY), want)
    assert ran.captures == 2
