"""What tools.evaluation says of needles and recall: where records stand, what is compressed, what counts as right."""

import pytest
import torch

import kvpatch
from kvpatch.errors import KVPatchError
from kvpatch.evaluation.teacher_forcing import Fed
from tools.evaluation import heatmap, needle, runs, together
from tools.evaluation.needle import Needle
from tools.evaluation.recall import Recall
from tools.evaluation.table import Table
from tools.evaluation.task import FULL, POLICIES, SMALL, Request, Setting
from tools.training import tasks

PLACES = {0.0: 1, 0.25: 16, 0.5: 31, 0.75: 45, 1.0: 60}  # of a record of four tokens in a context of 64
HAY = "The old bridge was closed. Rain fell on the market for days. Nobody in the valley had seen so many birds!\n\n"
HAY += "A boat came up the river? It carried salt and paper. The captain slept."


@pytest.fixture(scope="module")
def llama():
    return runs.load("llama-0", Request())


@pytest.fixture(scope="module")
def python():
    return runs.load("llama-python", Request())


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "hay.txt"
    path.write_text(HAY)
    return str(path)


def of(task, subject, seed=0, count=2, **options):
    return task.samples(subject, Request(count=count, options=options), seed)


def rights(task, subject, setting, samples, batch=32, seed=0):
    return [one["right"] for one in task.run(subject, setting, samples, Request(batch=batch), seed)]


def parts(samples):
    """Context and tail of each sample by its group's values."""
    return {(*s.group.values(), s.name.rpartition("/")[2]): s.data.rows.tokens_BT[0].tolist() for s in samples}


def test_the_asked_record_stands_exactly_at_its_depth_and_three_others_elsewhere(llama):
    for (_, kind, length, depth, _), row in parts(of(Needle(), llama, count=4, lengths=(64,))).items():
        context, tail = row[:64], row[64:]
        keys = [at for at, token in enumerate(context) if token in tasks.KEYS]
        assert (length, len(keys), context[0]) == (64, 4, tasks.BOS)
        assert all(set(context[at + 1 : at + 4]) <= set(tasks.VALUES) for at in keys)
        assert min(b - a for a, b in zip(keys, [*keys[1:], 64], strict=True)) >= 4
        if kind == "single":
            at = PLACES[depth]
            assert tail == [tasks.QUESTION, *context[at : at + 4]]
            assert at in keys and context.count(context[at]) == 1
            others = [token for token in context if token in tasks.VALUES and token not in context[at + 1 : at + 4]]
            assert len(others) == 9, "no value of the asked record stands anywhere else"
        else:
            asked = [tail[i : i + 5] for i in range(0, 20, 5)]
            assert depth == "all" and len(tail) == 20
            assert sorted(one[1:] for one in asked) == sorted(context[at : at + 4] for at in keys)


@pytest.mark.parametrize("length", [64, 232])
def test_all_depths_share_the_rest_of_the_context_and_scenarios_the_whole(llama, length):
    found = parts(of(Needle(), llama, count=3, lengths=length))
    for index in "012":
        rests, records = set(), set()
        for depth in PLACES:
            row, at = found["regular", "single", length, depth, index], 1 + round(depth * (length - 5))
            rests.add(tuple(row[:at] + row[at + 4 : length]))
            records.add(tuple(row[at : at + 4]))
            assert row == found["context", "single", length, depth, index]
        assert (len(rests), len(records)) == (1, 1)
        assert found["regular", "multi", length, "all", index] == found["context", "multi", length, "all", index]
    assert len({tuple(row) for row in found.values()}) == 3 * 6, "samples differ"


def test_samples_are_the_same_again_and_others_for_another_seed(llama):
    def names(seed, count):
        return {s.name: s.digest for s in of(Needle(), llama, seed=seed, count=count)}

    first, again, other = names(0, 1), names(0, 2), names(1, 1)
    assert len(first) == 2 * 3 * 6 and first.items() <= again.items()
    assert first.keys() == other.keys() and not set(first.values()) & set(other.values())


def spied(monkeypatch, module, name):
    """The results of a function of the module from now on."""
    found, real = [], getattr(module, name)

    def spy(*args, **kwargs):
        found.append((args, real(*args, **kwargs)))
        return found[-1][1]

    monkeypatch.setattr(module, name, spy)
    return found


@pytest.mark.parametrize(
    ("scenario", "n", "budget", "fed"), [("regular", 66, 33, 2), ("context", 64, 32, 4)], ids=["regular", "context"]
)
def test_what_is_compressed_and_what_comes_behind(llama, monkeypatch, scenario, n, budget, fed):
    """At half the budget: `fed` tokens behind the prompt, which only snapkv's schedule lets pile up."""
    calls = spied(monkeypatch, together, "feed")
    lengths = []
    hook = llama.model.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    here = [s for s in of(Needle(), llama, lengths=(64,)) if s.name.startswith(f"{scenario}/single")]
    assert {sample.n for sample in here} == {n}
    for policy, held in (("snapkv", budget + fed), ("h2o", budget)):
        rights(Needle(), llama, Setting(policy, 0.5, SMALL.get(policy, {})), here)
        (_, ids, prompt), out = calls[-1]
        assert prompt == n and lengths == [n, *[1] * fed]
        assert ((ids[:, :n] == tasks.QUESTION).sum(1) == (scenario == "regular")).all()
        assert out.cache.held(0).eq(held).all()
        lengths.clear()
    hook.remove()


def test_an_answer_is_right_when_all_three_values_are(llama, monkeypatch):
    """Logits by hand: of 17 predicted tokens in the regular multi prompt, some are made wrong."""
    two = [s for s in of(Needle(), llama, lengths=(64,)) if s.name.startswith("regular/multi")]
    truth_BC = torch.stack([s.data.rows.tokens_BT[0, 66:] for s in two])
    assert truth_BC.shape == (2, 18)
    wrong = truth_BC.clone()
    wrong[0, 0] += 1  # the first value of the first answer
    wrong[0, 7] = 0  # the third of the second: <q> k follow each answer
    wrong[0, 5] = 0  # the first of the second, which is wrong anyway
    wrong[1, [3, 4, 8, 9, 13, 14]] = 0  # questions, which nobody predicts
    logits = torch.nn.functional.one_hot(wrong, 400).float()
    monkeypatch.setattr(together, "feed", lambda *_: Fed(logits, None))
    assert rights(Needle(), llama, FULL, two) == [0.5, 1.0]


@pytest.mark.parametrize("setting", [FULL, Setting("window", 0.5), Setting("snapkv", 0.3, SMALL["snapkv"])], ids=str)
def test_right_is_what_greedy_decoding_writes(llama, setting):
    here = [s for s in of(Needle(), llama, lengths=(64,)) if s.name.startswith("regular/single")]
    wanted = []
    for sample in here:
        row = sample.data.rows.tokens_BT
        with setting.patched(llama.model):
            out = llama.model.generate(row[:, :66], max_new_tokens=3, do_sample=False, pad_token_id=tasks.PAD)
        wanted.append(float(out[0, 66:].tolist() == row[0, 66:].tolist()))
    assert rights(Needle(), llama, setting, here) == wanted
    assert setting.policy != "window" or 0 < sum(wanted) < len(wanted)


@pytest.mark.parametrize(
    ("task", "policy"),
    [(Needle(), "full"), (Needle(), "random"), (Needle(), "critical_adakv"), (Recall(), "keyformer")],
    ids=["full", "random", "critical_adakv", "recall"],
)
def test_rows_at_a_time_and_missing_samples_change_nothing(llama, task, policy):
    setting = FULL if policy == "full" else Setting(policy, 0.5, SMALL.get(policy, {}))
    samples = of(task, llama, lengths=(64,), depths=(0.0, 0.5)) if task.name == "needle" else of(task, llama)
    samples = samples if task.name == "needle" else samples[:4]
    many, one = rights(task, llama, setting, samples, 3), rights(task, llama, setting, samples, 1)
    assert many == pytest.approx(one, abs=1e-5)
    assert rights(task, llama, setting, samples[1::2]) == pytest.approx(many[1::2], abs=1e-5)
    assert len(many) == len(samples)


def test_samples_of_one_cell_lose_different_places_to_chance(llama, monkeypatch):
    """Draws belong to positions: under one seed all samples would keep or lose a depth together."""
    assert {name for name in (*POLICIES, "vase", "r_kv") if together.noisy(Setting(name))} == {"random", "keyformer", "vase"}
    seeds = []
    real = kvpatch.patched
    monkeypatch.setattr(kvpatch, "patched", lambda *args, **more: seeds.append(more["seed"]) or real(*args, **more))
    here = [s for s in of(Needle(), llama, count=3, lengths=(64,)) if s.name.startswith("regular/single")]
    rights(Needle(), llama, Setting("random", 0.5), here, seed=2)
    assert seeds == [200006, 200007, 200008]
    seeds.clear()
    rights(Needle(), llama, Setting("h2o", 0.5), here)
    assert len(seeds) == 1, "others run together"
    seeds.clear()
    rights(Recall(), llama, Setting("random", 0.5), of(Recall(), llama, count=9)[:9])
    assert seeds == [0, 1]


def test_chance_is_the_share_that_is_kept():
    assert Needle().chance(0.3, {"scenario": "context"}) == 0.3
    assert Needle().chance(16, {"length": 64}) == 0.25
    assert Needle().chance(100, {"length": 64}) == 1.0
    assert Needle().chance(16, {}) is None and Needle().chance("1MiB", {"length": 64}) is None
    assert Recall().chance(0.3, {}) is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lengths": (600,)}, "lengths=600: llama-0 has 512 positions, 20 of them for questions"),
        ({"lengths": (493,)}, "lengths=493: "),
        ({"lengths": (16,)}, "length=16: 4 records need 17"),
        ({"lengths": (18,)}, "length=18: records do not fit"),
        ({"depths": (0, 2)}, "give shares of the context from 0 to 1"),
        ({"lengths": "short"}, "lengths=short: "),
    ],
)
def test_what_cannot_be_is_said(llama, options, said):
    with pytest.raises(KVPatchError, match=said):
        of(Needle(), llama, **options)


# ---- recall ----


def test_recall_asks_the_same_of_one_sequence(llama):
    samples = of(Recall(), llama)
    assert [s.name for s in samples] == ["in/0", "in/1", "after/0", "after/1", "stream/0", "stream/1"]
    for index in range(2):
        first, after, stream = (s.data.rows for s in samples[index::2])
        assert torch.equal(after.tokens_BT, stream.tokens_BT) and torch.equal(first.tokens_BT, after.tokens_BT[:, :221])
        assert (first.prompt_length, after.prompt_length, stream.prompt_length) == (218, 216, 216)
        assert first.answers_AW.tolist() == [[218, 219, 220]] and after.answers_AW.shape == (8, 3)
        row = after.tokens_BT[0].tolist()
        for start in range(216, 256, 5):
            at = row.index(row[start + 1])
            assert at < 216 and row[at : at + 4] == row[start + 1 : start + 5]
    assert rights(Recall(), llama, FULL, samples) == [1.0] * 6


@pytest.mark.parametrize("policy", ["h2o", "critical_snapkv"])
def test_stream_is_the_context_fed_eight_at_a_time(llama, monkeypatch, policy):
    calls = spied(monkeypatch, together, "feed")
    after, stream = (of(Recall(), llama, count=1)[i] for i in (1, 2))
    setting, row = Setting(policy, 60, SMALL.get(policy, {})), stream.data.rows.tokens_BT
    with torch.no_grad(), setting.patched(llama.model) as patch:
        cache, logits = patch.new_cache(), []
        for start, stop in [(i, i + 8) for i in range(0, 216, 8)] + [(i, i + 1) for i in range(216, 255)]:
            logits.append(llama.model(row[:, start:stop], past_key_values=cache).logits[0, -1])
    wanted = torch.stack(logits)[26:]
    guesses, answers = wanted.argmax(-1).tolist(), row[0, 216:].tolist()
    right = [guesses[i + 2 : i + 5] == answers[i + 2 : i + 5] for i in range(0, 40, 5)]
    found = [rights(Recall(), llama, setting, [sample])[0] for sample in (stream, after)]
    torch.testing.assert_close(calls[0][1].logits_BSV[0], wanted, atol=1e-4, rtol=0)
    assert found[0] == sum(right) / 8
    assert (calls[1][1].logits_BSV[0] - wanted).abs().max() > 0.1, "read at once, something else is kept"


@pytest.mark.parametrize("task", [Recall, Needle])
def test_synthetic_tasks_want_a_model_that_knows_their_words(python, task):
    with pytest.raises(KVPatchError, match="llama-python does not know the words of .*: give --models llama-0"):
        of(task(), python)


# ---- pictures ----


def drawn(monkeypatch):
    figures = []
    monkeypatch.setattr(heatmap, "save", lambda figure, path: figures.append((figure, path)))
    return figures


def test_a_panel_per_policy_with_its_values_on_one_scale(monkeypatch):
    figures = drawn(monkeypatch)
    table = {"random": [[0.0, 0.25], [None, 1.0]], "chance": [[0.3, 0.3], [0.3, 0.3]]}
    heatmap.heatmap(table, [64, 128], [0.0, 1.0], "tokens", "depth", {"random": "random, k = 0.3"}, "x.png")
    (figure, path) = figures[0]
    first, second = [axes for axes in figure.axes if axes.get_title(loc="left")]
    assert path == "x.png" and [a.get_title(loc="left") for a in (first, second)] == ["random, k = 0.3", "chance"]
    assert {t.get_position(): t.get_text() for t in first.texts} == {(0, 0): "0.00", (1, 0): "0.25", (1, 1): "1.00"}
    assert [image.get_clim() for axes in (first, second) for image in axes.images] == [(0, 1), (0, 1)]
    assert [label.get_text() for label in first.get_yticklabels()] == ["64", "128"]
    assert [label.get_text() for label in first.get_xticklabels()] == ["0.0", "1.0"]


def test_a_picture_that_cannot_be_drawn_is_said(tmp_path):
    heatmap.heatmap({"h2o": [[0.5]]}, [64], [0.0], "tokens", "depth", {}, tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(KVPatchError, match="The panel of h2o is not 2 rows of 1 cells"):
        heatmap.heatmap({"h2o": [[0.5]]}, [64, 128], [0.0], "", "", {}, tmp_path / "x.png")
    with pytest.raises(KVPatchError, match="no policy"):
        heatmap.heatmap({}, [], [], "", "", {}, tmp_path / "x.png")
    with pytest.raises(KVPatchError, match="does not exist"):
        heatmap.heatmap({"h2o": [[0.5]]}, [64], [0.0], "", "", {}, tmp_path / "no" / "x.png")


def line(name, k, depth, right, kind="single", sample="0"):
    group = {"scenario": "context", "kind": kind, "length": 64, "depth": depth}
    head = {"model": "m", "recipe": "m", "seed": 0, "name": name, "policy": name, "k": k}
    return head | {"group": group, "sample": sample, "metrics": {"right": right}}


def test_pictures_have_the_mean_of_every_cell_with_full_and_chance(monkeypatch, tmp_path):
    found = []
    monkeypatch.setattr(needle, "heatmap", lambda *args: found.append(args))
    lines = [line("full", 1.0, depth, 1.0) for depth in (0.0, 1.0)]
    for k in (0.3, 1.0):
        lines += [line("h2o", k, 1.0, 1.0, sample="0"), line("h2o", k, 1.0, 0.5, sample="1")]
    lines += [line("h2o", 0.3, "all", 0.0, kind="multi"), line("h2o", 0.3, 0.0, 0.25)]
    Needle().pictures(Table(lines), tmp_path)
    panels, rows, columns, *labels, titles, path = found[0]
    assert panels == {"full": [[1.0, 1.0]], "h2o": [[0.25, 0.75]], "chance": [[0.3, 0.3]]}
    assert (rows, columns, labels) == ([64], [0.0, 1.0], ["tokens of the context", "depth"])
    assert path == tmp_path / "needle-context-0.3.png"
    assert titles["full"] == "full (context, k = 0.3)" and len(found) == 2
    assert found[1][0] == {"full": [[1.0, 1.0]], "h2o": [[None, 0.75]], "chance": [[1.0, 1.0]]}
