"""What tools.evaluation says of perplexity: which tokens count, under which budget, and what they cost by hand."""

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import kvpatch
from kvpatch.errors import KVPatchError
from tools.evaluation import perplexity, runs
from tools.evaluation.perplexity import Perplexity, in_way, nats, windows
from tools.evaluation.task import FULL, SMALL, Request, Setting


@pytest.fixture(scope="module")
def python():
    return runs.load("llama-python", Request())


@pytest.fixture
def text(tmp_path):
    rng = random.Random(0)
    lines = (f"def f{i}(x):\n    return x + {rng.randrange(1000)} * f{rng.randrange(60)}(x)\n" for i in range(60))
    path = tmp_path / "text.py"
    path.write_text("\n".join(lines))
    return str(path)


def of(subject, data, seed=0, count=3, **options):
    options = {"window": 48} | options
    return Perplexity().samples(subject, Request(count=count, data=data, options=options), seed)


def measured(subject, setting, samples, batch=32, seed=0, **options):
    request = Request(batch=batch, options=options)
    return [one["nats"] for one in Perplexity().run(subject, setting, samples, request, seed)]


def cost(logits_V, token):
    """-log softmax of one token, in plain numbers."""
    logits = logits_V.tolist()
    return math.log(sum(math.exp(value) for value in logits)) - logits[token]


def test_logits_by_hand_give_nats_by_hand():
    """Three words; after token t the model gives t + 1 twice the odds of each other word."""
    ids = torch.tensor([[0, 1, 2, 0, 0]])

    def model(ids_BT, use_cache):
        assert use_cache is False
        following = (ids_BT + 1) % 3
        return SimpleNamespace(logits=torch.nn.functional.one_hot(following, 3) * math.log(2))

    model.forward = lambda input_ids, use_cache: None
    # the last three tokens are 2 (expected), 0 (expected), 0 (not): 2/4, 2/4 and 1/4
    wanted = torch.tensor([[math.log(2), math.log(2), math.log(4)]])
    torch.testing.assert_close(nats(model, ids, 3, "block"), wanted)


@pytest.mark.parametrize("way", ["block", "token"])
def test_a_window_costs_the_mean_over_its_last_tokens(python, text, way):
    samples = [s for s in of(python, text, stride=10) if s.group == {"way": way}]
    wanted = []
    for sample in samples:
        ids = sample.data.ids_T
        with torch.no_grad():
            logits = python.model(ids[None]).logits[0].double()
        wanted.append(sum(cost(logits[t - 1], ids[t]) for t in range(38, 48)) / 10)
    assert measured(python, FULL, samples) == pytest.approx(wanted, abs=1e-5)
    assert len(set(wanted)) == 3


@pytest.mark.parametrize(("policy", "block"), [("window", 1), ("h2o", 1), ("h2o", 7), ("snapkv", 7)])
def test_block_by_block_is_one_block_fed_after_another(python, text, policy, block):
    samples = [s for s in of(python, text, count=2) if s.data.way == "block"]
    setting, wanted = Setting(policy, 0.25, SMALL.get(policy, {})), []
    for sample in samples:
        ids = sample.data.ids_T[None]
        with torch.no_grad(), kvpatch.patched(python.model, policy, 12, **setting.options) as patch:
            cache, logits = patch.new_cache(), []
            for start in range(0, 48, block):
                logits.append(python.model(ids[:, start : start + block], past_key_values=cache).logits[0].double())
                assert cache.held(0).max() <= 12
        whole = torch.cat(logits)
        wanted.append(sum(cost(whole[t - 1], ids[0, t]) for t in range(24, 48)) / 24)
    found = measured(python, setting, samples, block=block)
    assert found == pytest.approx(wanted, abs=1e-5)
    assert measured(python, FULL, samples) != pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("policy", ["window", "roco"])
def test_token_by_token_is_a_prompt_and_single_steps_that_each_evict(python, text, policy):
    samples = [s for s in of(python, text, count=2, stride=20) if s.data.way == "token"]
    wanted = []
    for sample in samples:
        ids, costs = sample.data.ids_T[None], []
        with torch.no_grad(), kvpatch.patched(python.model, policy, 24, schedule="both") as patch:
            cache = patch.new_cache()
            for start, stop in [(0, 28), *((t, t + 1) for t in range(28, 47))]:
                logits = python.model(ids[:, start:stop], past_key_values=cache).logits[0, -1].double()
                costs.append(cost(logits, ids[0, stop]))
                assert cache.held(0).eq(24).all()
        wanted.append(sum(costs) / 20)
    assert measured(python, Setting(policy, 0.5), samples) == pytest.approx(wanted, abs=1e-5)


def test_a_share_is_of_the_whole_window():
    ways = {way: in_way(Setting("h2o", 0.3, {"recent": 4}), way, 256, 16) for way in ("block", "token")}
    assert {way: setting.k for way, setting in ways.items()} == {"block": 76, "token": 76}
    assert ways["block"].options == {"recent": 4, "block": 16}
    assert ways["token"].options == {"recent": 4, "schedule": "both"}
    kept = [in_way(Setting("h2o", k), "token", 256, 16).k for k in (1.0, 40, 0.001, "1MiB", [0.5, 0.2])]
    assert kept == [1.0, 40, 1, "1MiB", [0.5, 0.2]] and isinstance(kept[0], float)
    assert in_way(Setting("h2o", 0.5, {"schedule": "prompt"}), "token", 256, 16).options == {"schedule": "prompt"}
    assert in_way(FULL, "block", 256, 16) == FULL


def test_no_token_counts_twice_and_every_window_begins_with_bos(python, text):
    texts = [torch.arange(100), torch.arange(9), torch.arange(20)]
    assert windows(texts, 20, 30) == [(0, 0), (0, 30), (0, 60), (2, 0)]
    samples = [s for s in of(python, text, count=1000, stride=13) if s.data.way == "block"]
    (ids,) = perplexity.texts_of(python, text)
    counted = []
    for sample in samples:
        start = int(sample.name.rpartition("/")[2])
        assert sample.n == len(sample.data.ids_T) == 48 and sample.data.ids_T[0] == python.tokenizer.bos_token_id
        assert torch.equal(sample.data.ids_T[1:], ids[start : start + 47])
        counted += range(start + 47 - 13, start + 47)
    assert len(counted) == len(set(counted)) > 500
    assert sorted(counted) == list(range(34, 34 + len(counted))), "nor is any left out"


def test_samples_are_the_same_again_and_others_for_another_seed(python, text):
    def names(seed, count):
        return {s.name: s.digest for s in of(python, text, seed=seed, count=count)}

    assert names(0, 3).items() <= names(0, 5).items() and len(names(0, 5)) == 10
    assert names(0, 3) == names(0, 3) != names(1, 3)


@pytest.mark.parametrize("policy", ["full", "random"])
def test_rows_at_a_time_and_missing_samples_change_nothing(python, text, policy, monkeypatch):
    monkeypatch.setattr(perplexity, "ROWS_PER_DRAW", 2)
    setting, samples = FULL if policy == "full" else Setting(policy, 0.3), of(python, text, count=4)
    many, one = measured(python, setting, samples, 3), measured(python, setting, samples, 1)
    assert many == pytest.approx(one, abs=1e-5)
    assert measured(python, setting, samples[1::3]) == pytest.approx(many[1::3], abs=1e-5)
    monkeypatch.setattr(perplexity, "MOST_LOGITS", 1)
    assert measured(python, setting, samples) == pytest.approx(many, abs=1e-5)


def test_windows_take_several_draws(python, text, monkeypatch):
    seeds, real = [], kvpatch.patched
    monkeypatch.setattr(kvpatch, "patched", lambda *args, **more: seeds.append(more["seed"]) or real(*args, **more))
    measured(python, Setting("random", 0.3), [s for s in of(python, text, count=9) if s.data.way == "block"], seed=1)
    assert seeds == [100003, 100004]
    seeds.clear()
    measured(python, Setting("h2o", 0.3), [s for s in of(python, text) if s.data.way == "block"], batch=2)
    assert len(seeds) == 2, "three windows, two at a time"


def test_what_only_knows_prompts_is_measured_block_by_block_before_it_is_refused(python, text):
    samples = of(python, text, count=2)
    found = Perplexity().run(python, Setting("snapkv", 0.3, SMALL["snapkv"]), samples, Request(), 0)
    assert [s.data.way for s in samples] == ["block", "block", "token", "token"]
    assert [set(next(found)) for _ in range(2)] == [{"nats"}] * 2
    with pytest.raises(KVPatchError, match="schedule='both': policy 'snapkv'"):
        next(found)


def test_the_code_model_reads_held_out_sources_in_rows_like_its_own(python, monkeypatch):
    asked = []
    source = "\n".join(f"x{i} = {i}" for i in range(400))
    monkeypatch.setattr(perplexity.train, "python_sources", lambda held_out: asked.append(held_out) or [source])
    samples = Perplexity().samples(python, Request(count=2), 0)
    assert asked == [True]
    assert [(s.n, s.data.counted) for s in samples] == [(256, 128)] * 4


def test_models_of_others_read_the_same_in_windows_as_long_as_they_take(python, monkeypatch):
    source = "\n".join(f"x{i} = {i}" for i in range(400))
    monkeypatch.setattr(perplexity.train, "python_sources", lambda held_out: [source])
    other = replace(python, name="other", recipe="other")
    assert {(s.n, s.data.counted) for s in Perplexity().samples(other, Request(count=2), 0)} == {(512, 256)}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"window": 600}, "window=600: llama-python has 512 positions; give -o window=256"),
        ({"window": 1}, "window=1"),
        ({"window": 48, "stride": 48}, "stride=48 must be from 1 to 47; give -o stride=24"),
        ({"window": 48, "stride": 0}, "stride=0"),
        ({"window": 512}, "No text has 512 tokens: give -o window=7 or less"),
    ],
)
def test_what_cannot_be_is_said(python, tmp_path, options, said):
    path = tmp_path / "short.txt"
    path.write_text("a b c d e f")
    with pytest.raises(KVPatchError, match=said):
        of(python, str(path), **options)


def test_a_model_that_reads_no_text_is_refused(python, text):
    with pytest.raises(KVPatchError, match="llama-0 is no language model: give --models llama-python"):
        of(runs.load("llama-0", Request()), text)
    silent = SimpleNamespace(name="silent", model=python.model, tokenizer=None, recipe="silent", synthetic=False)
    with pytest.raises(KVPatchError, match="silent has no tokenizer"):
        of(silent, text)
