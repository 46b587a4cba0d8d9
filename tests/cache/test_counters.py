"""Counters of a text: columns, steps and temperatures, in Python and on the device that a compiled step reads."""

from types import SimpleNamespace

import pytest
import torch

import kvpatch
from kvpatch.cache import compiled
from kvpatch.cache.counters import DeviceCounters
from kvpatch.cache.token_ids import UNKNOWN
from tests.helpers.running import N, read
from tests.helpers.tiny import make, prompt

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture(scope="module")
def model():
    return make("llama_gqa")


def test_a_temperature_that_is_traced_goes_by_the_clock(model):
    """A traced step has no Python number in it; Python's own counters are then behind."""
    cache = read(model, "keyformer", 0.5, steps=2, tau=(1.0, 3.0), generation_length=8)
    assert (cache.counters.tensors_or_none.steps.item(), cache.counters.tensors_or_none.temperature_steps.item()) == (2, 8)
    cache.now = SimpleNamespace(traced=True, first_step=99)
    assert cache.temperature(0).item() == 1.5
    assert cache.temperature(2).item() == 2.0
    cache.counters.steps_behind_B = torch.tensor([0.0, 2.0])
    assert cache.temperature(2).tolist() == [2.0, 1.5]
    cache.now.traced, cache.now.first_step = False, 4
    assert cache.temperature(2).tolist() == [2.5, 2.0]
    cache.counters.steps_behind_B = None
    assert cache.temperature(2) == 2.5


@pytest.mark.parametrize(("policy", "room", "limit"), [("h2o", None, 0), ("h2o", 6, 0), ("snapkv", 6, N + 6)])
def test_the_clock_of_a_cache(model, policy, room, limit, monkeypatch):
    """columns, limit, steps and span, which a compiled step reads; marked as standing still where there is room."""
    marked, mark = [], compiled.mark_static
    monkeypatch.setattr(compiled, "mark_static", lambda cache: (marked.append(cache), mark(cache)))
    cache = read(model, policy, 0.5, room=room)
    clock = cache.counters.tensors_or_none
    assert [one.item() for one in (clock.columns, clock.limit, clock.steps, clock.temperature_steps)] == [N, limit, 0, 1]
    assert len(marked) == (room is not None)
    cache = read(model, policy, 0.5, steps=3, room=room)
    assert len(marked) == 2 * (room is not None)
    device = cache.counters.tensors_or_none
    assert [one.item() for one in (device.columns, device.limit, device.steps)] == [N + 3, limit, 3]


@pytest.mark.parametrize(
    ("policy", "k", "options"),
    [("adakv", 0.4, {"window": 5}), ("h2o", kvpatch.Mass(0.9), {"recent": 4})],
    ids=["adakv", "mass"],
)
def test_a_ragged_layer_says_how_far_it_may_grow(model, policy, k, options):
    with kvpatch.patched(model, policy, k, **options) as handle:
        cache = handle.new_cache()
        for turn in (1, 2):
            model(prompt(2, N), past_key_values=cache)
            slack = min(layer.mode.slack for layer in cache.layers)
            assert slack > 0
            assert cache.counters.tensors_or_none.limit.item() == turn * N + slack


def test_counters_catch_up_with_compiled_steps(model):
    cache = read(model, "h2o", 0.5, room=4)
    compiled.begin_step(cache, None, None)  # and its layers run unseen
    compiled.end_step(cache)
    assert cache.counters.has_uncounted_steps
    assert cache.layers[0].columns_read == N
    assert cache.get_seq_length() == N + 1
    assert (cache.counters.has_uncounted_steps, cache.counters.steps, cache.unfinished) == (False, 1, False)


def test_under_torch_compile_a_length_is_a_tensor(model, monkeypatch):
    cache = read(model, "h2o", 0.5, steps=1)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert cache.get_seq_length() is cache.counters.tensors_or_none.columns
    cache.counters.tensors_or_none = None
    assert cache.get_seq_length() == N + 1


def test_who_is_compiled_by_generate(model):
    assert read(model, "h2o", 0.5).settings.acts is True
    assert read(model, "full", 0.5).settings.acts is False
    assert read(model, "h2o", 0.5).is_compileable is False
    assert read(model, "h2o", 0.5, room=4).is_compileable is True


def test_the_end_of_a_prompt_foresees_who_takes_the_steps(model):
    """For the report of steps that are compiled, which say nothing themselves."""
    assert read(model, "h2o", 0.5).backend_choice.may_run.keys() == {"decode"}
    assert read(model, "adakv", 0.4, window=5).backend_choice.may_run.keys() == {"ragged"}


def test_the_tape_says_which_ids_were_overwritten():
    counters = DeviceCounters(torch.device("cpu"), 1, 0)
    N = counters.tape_BN.shape[1]
    for column in range(N + 3):
        counters.columns.fill_(column)
        counters.write_tape(torch.tensor([[column]]))
    assert counters.read_tape(3, N).tolist() == [list(range(3, N + 3))]
    assert counters.read_tape(1, N + 2).tolist() == [[UNKNOWN] * 2 + list(range(3, N + 3))]
