"""kvpatch beside another library: the orders, the figures, and the presses where the peer's environment is there."""

import importlib
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from tests.helpers.marks import slow_but
from tools.bench import __main__ as bench
from tools.bench import models as bench_models
from tools.bench import peer, peer_kvpatch, peer_worker

OURS = (sys.executable, peer.OURS)
KVPRESS = peer.PEERS["kvpress"]
TOKEN = 2 * 2 * 64 * 4  # bytes: two layers, keys and values, one KV head of size 64, float32


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def worker():
    """Our side in this process."""
    it = peer_worker.Worker(peer_kvpatch.side())
    it.model = bench_models.build("llama", 200, tiny=True)
    return it


# ---- one side ----


def test_a_unit_is_a_whole_run(worker):
    answer = worker.unit("streaming_llm", n=100, steps=3, kept=True)
    assert json.loads(json.dumps(answer)) == answer
    assert all(len(answer[what]) == 2 and min(answer[what]) > 0 for what in ("prompt", "decode"))
    assert answer["kept"] == [[[0, 1, 2, 3, *range(54, 100)]]] * 2
    full, held = answer["bytes"]
    assert full == 100 * TOKEN and 50 * TOKEN <= held <= 60 * TOKEN
    assert "kept" not in worker.unit("streaming_llm", n=100, steps=1)


@pytest.mark.parametrize("case", slow_but(("h2o", "snapkv", "block_key_norm"), peer_kvpatch.POLICIES))
def test_every_policy_keeps_half_of_the_prompt_and_then_everything(worker, case):
    seen, forward = [], peer_worker.forward

    def spy(model, ids, past=None, position_ids=None):
        found = forward(model, ids, past, position_ids=position_ids)
        seen.append((found[0], ids.shape[1], position_ids))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_worker, "forward", spy)
        answer = worker.unit(case, n=160, steps=2, kept=True)
    assert sum(len(head) for layer in answer["kept"] for head in layer) == 2 * 80
    past = seen[-1][0]
    assert sum(int(past.held(layer).sum()) for layer in range(2)) == 2 * (80 + 2)  # nothing is evicted afterwards
    assert [at.item() for _, q, at in seen if q == 1] == [160, 160, 161, 161]


# ---- both sides ----


class Stub:
    """A side that answers from a list and notes its orders."""

    def __init__(self, name, log, logits=None):
        self.name, self.log, self.values = name, log, logits

    def ask(self, do, **order):
        self.log.append((self.name, do, order))
        if do == "logits":
            save_file({"logits": torch.tensor(self.values)}, order["path"])
        return {"order": len(self.log)}


@pytest.mark.parametrize("other", [[1.0, 2.1], [1.0, float("nan")], [1.0, 2.0, 3.0]])
def test_other_weights_are_refused(tmp_path, other):
    same = [Stub("a", [], [1.0, 2.0]), Stub("b", [], [1.0, 2.0001])]
    assert peer.disagreement(*same, 8, str(tmp_path)) == pytest.approx(5e-5, rel=0.01)
    with pytest.raises(RuntimeError, match="not the same weights"):
        peer.disagreement(same[0], Stub("b", [], other), 8, str(tmp_path))


def test_figures_leave_the_first_unit_out():
    units = [
        {"prompt": [1, 100], "decode": [1, 100], "bytes": [10, 4], "eager": 1},
        {"prompt": [10, 20], "decode": [4, 2], "bytes": [10, 9], "eager": 40},
        {"prompt": [10, 30], "decode": [4, 3], "bytes": [10, 9], "eager": 20},
        {"prompt": [10, 90], "decode": [4, 4], "bytes": [10, 9], "eager": 90},
    ]
    found = peer.figure(units, eager=True)
    assert (found["prompt_ratio"], found["decode_ratio"], found["bytes_ratio"]) == (3.0, 0.75, 0.4)
    assert (found["prompt_ms_unpatched"], found["prompt_ms"]) == (10, 30)
    assert (found["prompt_ratio_eager"], found["attention"]) == (1.0, "eager")


def test_alike_is_the_share_that_both_kept():
    assert peer.alike([[[0, 1], [2, 3]]], [[[0, 1], [3, 4]]]) == 0.75
    assert peer.alike([[[0, 1, 2]]], [[[0]]]) == pytest.approx(1 / 3)


def test_the_table_has_both_sides_the_roof_and_the_notes():
    side = {"prompt_ratio": 1.0, "decode_ratio": 0.9, "bytes_ratio": 0.5, "memory_ratio": 0.8}
    side |= {"prompt_roof_ms": 3.0, "prompt_ms_unpatched": 4.0, "decode_roof_ms": 1.0, "decode_ms_unpatched": 4.0}
    other = {name: value + 1 for name, value in side.items()} | {"prompt_ratio_eager": 1.5}
    line = {"case": "peer", "policy": "h2o", "n": 64, "ours": side, "theirs": other, "alike": 0.97, "note": "so"}
    table = peer.markdown([line]).splitlines()
    cells = ["h2o", "64", "1.000", "2.000", "0.75", "0.900", "1.900", "0.25", "0.500", "1.500", "0.800", "1.800", "0.970"]
    assert table[2].strip("| ").split(" | ") == cells
    assert len(peer.COLUMNS) == len(cells)
    assert table[4:] == ["- `h2o`: so", "- `h2o`: theirs to unpatched eager 1.500"]
    assert bench.tables([line]) == peer.markdown([line])


# ---- kvpress ----


@pytest.fixture
def kvpress_side(monkeypatch):
    """The other side's file without its library."""
    monkeypatch.setitem(sys.modules, "kvpress", SimpleNamespace())
    monkeypatch.delitem(sys.modules, "tools.bench.peer_kvpress", raising=False)
    yield importlib.import_module("tools.bench.peer_kvpress")
    sys.modules.pop("tools.bench.peer_kvpress", None)


def test_both_sides_name_the_same_cases(kvpress_side):
    assert set(kvpress_side.PRESSES) == set(peer_kvpatch.POLICIES)
    assert set(peer.NOTES) <= set(kvpress_side.PRESSES)


@pytest.mark.parametrize("rounding", [1e-6, -1e-6])
def test_what_a_press_kept_is_found_by_the_keys(kvpress_side, rounding):
    keys = torch.randn(1, 2, 40, 8, generator=torch.Generator().manual_seed(0))
    expected = [[[0, 7, 39], [1, 2, 3]]]
    taken = torch.stack([keys[0, head, at] for head, at in enumerate(expected[0])])[None]
    model = SimpleNamespace(model=SimpleNamespace(layers=[SimpleNamespace(self_attn=SimpleNamespace())]))
    full, past = (SimpleNamespace(layers=[SimpleNamespace(keys=k)]) for k in (keys, taken.flip(2) + rounding))
    assert kvpress_side.kept(model, full, past) == expected


def test_what_a_press_masks_is_not_kept(kvpress_side):
    masked = (torch.zeros(3, dtype=torch.long), torch.tensor([0, 0, 1]), torch.tensor([0, 2, 1]))
    attention = SimpleNamespace(masked_key_indices=masked)
    model = SimpleNamespace(model=SimpleNamespace(layers=[SimpleNamespace(self_attn=attention)]))
    whole = SimpleNamespace(layers=[SimpleNamespace(keys=torch.randn(1, 2, 3, 8))])
    assert kvpress_side.kept(model, whole, whole) == [[[1], [0, 2]]]


@pytest.mark.skipif(not KVPRESS[1].exists(), reason="needs the peer's environment: make peer-env")
def test_kvpress_keeps_what_kvpatch_keeps():
    cases = ["snapkv", "adakv", "tova", "h2o", "random"]
    sides = [OURS, (KVPRESS[1], KVPRESS[0])]
    found = {line["policy"]: line for line in peer.compare(sides, cases, [160], 1, tiny=True, steps=2, memory=False)}
    assert list(found) == cases
    assert all(found[name]["alike"] == 1.0 for name in cases[:4]) and found["random"]["alike"] < 0.8
    assert {name: line["theirs"]["bytes_ratio"] for name, line in found.items()} == dict.fromkeys(cases, 0.5) | {"adakv": 1.0}
    assert found["h2o"]["theirs"]["attention"] == "eager" and found["h2o"]["theirs"]["prompt_ratio_eager"] > 0
    assert found["tova"]["theirs"]["versions"]["kvpress"]
