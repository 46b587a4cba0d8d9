"""`kvpatch compare`: its figures by hand, its sentences on rows made by hand, and the command on a small model."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

import kvpatch
from kvpatch import plotting
from kvpatch.cli import compare as comparing
from kvpatch.cli import compare_view
from kvpatch.cli.commands import app
from kvpatch.cli.compare import choose_policies, parse_budgets
from kvpatch.cli.compare_text import read_text
from kvpatch.cli.loading import MODELS, load_tokenizer
from kvpatch.errors import KVPatchError
from kvpatch.evaluation.divergence import Comparison, DivergenceFigures, DivergenceTable, Row, divergence
from kvpatch.evaluation.teacher_forcing import Fed, feed
from kvpatch.policies import Calibration
from tests.helpers import tiny

MODEL = MODELS / "llama-python"
TEXT = "import os\n\n\ndef walk(path):\n    for name in os.listdir(path):\n        yield os.path.join(path, name)\n"


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def prompt(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "prompt.txt"
    path.write_text(TEXT)
    return path


# ---- figures ----


def test_divergence_by_hand():
    p = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0.0, 0.5, 0.5]], dtype=torch.float64)
    q = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1], [0.0, 0.8, 0.2]], dtype=torch.float64)
    kl, same = divergence(p.log(), q.log())
    # 0.5 log 2 - 0.25 log 2; nothing; 0.5 log 0.625 + 0.5 log 2.5 with the token that p excludes left out
    assert kl.tolist() == pytest.approx([0.25 * math.log(2), 0.0, 0.5 * math.log(0.625 * 2.5)], abs=1e-12)
    assert same.tolist() == [False, True, True]
    assert divergence(q.log(), p.log())[0][0] == pytest.approx(0.25 * math.log(2))
    assert divergence(q.log(), p.log())[0][2] != pytest.approx(float(kl[2]), abs=1e-3)  # not symmetric


def test_figures_by_hand(monkeypatch):
    """Distributions that are written out: the one after the prompt is left out, and loss is that of the tokens that follow."""
    full = torch.full((4, tiny.VOCAB), 1e-12)
    other = full.clone()
    full[0, :3], other[0, :3] = torch.tensor([0.9, 0.05, 0.05]), torch.tensor([0.05, 0.05, 0.9])  # must not count
    full[1, :3], other[1, :3] = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
    full[2, :3], other[2, :3] = torch.tensor([0.2, 0.2, 0.6]), torch.tensor([0.2, 0.2, 0.6])
    full[3, :3], other[3, :3] = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.5, 0.25, 0.25])

    def written(model, ids, n):
        evicting = any("_kvpatch" in vars(module) for module in model.modules())
        probabilities = (other if evicting else full)[None, : ids.shape[1] - n + 1]
        return Fed(probabilities.log(), feed(model, ids, n).cache)

    monkeypatch.setattr("kvpatch.evaluation.divergence.feed", written)
    ids = torch.cat([tiny.prompt(1, 12), torch.tensor([[1, 0, 2]])], 1)
    model = tiny.make("llama")
    comparison = Comparison(model, ids, 12)
    one = comparison.measure_policy(kvpatch.get_policy("window"), 5)
    assert one.kl == pytest.approx(0.25 * math.log(2) / 3, rel=1e-5)
    assert one.worst == pytest.approx(0.25 * math.log(2), rel=1e-5)
    assert one.agreement == pytest.approx(2 / 3)
    assert one.loss == pytest.approx(math.log(2) / 2, rel=1e-5)  # token 0: 0.5 in full, 0.25 evicted; then token 2: alike
    assert (one.budget, one.held, one.cut) == (5, (5, 5), {})
    # 2 layers, 4 heads, 8 numbers, keys and values, 4 bytes: 15 tokens, and 5 with the free slot
    assert (comparison.nbytes, one.nbytes) == (512 * 15, 512 * 6)
    result = comparison.run({"window": kvpatch.get_policy("window")}, {"5": 5})
    assert (result.n, result.fed) == (12, 3)
    assert result.rows == [Row("window", "5", one)]


def test_figures_are_those_of_the_patched_model():
    model, ids = tiny.make("llama_gqa"), tiny.prompt(1, 36)
    comparison = Comparison(model, ids, 30, seed=3)
    one = comparison.measure_policy(kvpatch.get_policy("keyformer"), 0.4)
    full = tiny.force(model, ids[:, :30], ids[:, 30:])[0][0, 1:].double().log_softmax(-1)
    with kvpatch.patched(model, "keyformer", 0.4, seed=3):
        evicted = tiny.force(model, ids[:, :30], ids[:, 30:])[0][0, 1:].double().log_softmax(-1)
    kl = torch.nn.functional.kl_div(evicted, full, log_target=True, reduction="none").sum(-1)
    assert one.kl == pytest.approx(float(kl.mean()), rel=1e-4)
    assert one.worst == pytest.approx(float(kl.max()), rel=1e-4)
    assert one.kl > 1e-3
    assert one.held == (12, 12)
    low, high = comparison.measure_policy(kvpatch.get_policy("adaptive(h2o)"), 0.4).held
    assert low < 12 < high


@pytest.mark.parametrize(("policy", "k"), [("full", 0.5), ("h2o", 1.0), ("adakv", 1.0), ("snapkv", 99)])
def test_nothing_evicted_changes_nothing(policy, k):
    one = Comparison(tiny.make("llama_gqa"), tiny.prompt(1, 24), 20).measure_policy(kvpatch.get_policy(policy), k)
    assert one.kl == pytest.approx(0.0, abs=1e-9)
    assert one.agreement == 1.0
    assert (one.budget, one.held, one.cut) == (10 if policy == "full" else 20, (24, 24), {})


def test_sizes_that_the_budget_cuts():
    comparison = Comparison(tiny.make("llama"), tiny.prompt(1, 44), 40)

    def cut(name, k, **options):
        return comparison.measure_policy(kvpatch.get_policy(name).with_options(**options), k).cut

    assert cut("snapkv", 0.5) == {"window": (32, 10)}
    assert cut("critical(adaptive(snapkv))", 12) == {"window": (32, 6)}
    assert cut("snapkv", 33) == {}
    assert cut("snapkv", 8, window=4, recent=9, sinks=2) == {"recent": (9, 6)}
    assert cut("roco", 12) == {"protected": (6, 2)}
    assert cut("vase", 0.5) == {"window": (64, 16), "ranges": (5, 0)}
    assert cut("streaming_llm", 3) == {"sinks": (4, 3)}
    assert cut("h2o", 3) == cut("roco", 20) == cut("window", 1) == {}
    assert cut("snapkv", 1.0) == {}


def test_a_refusal_is_a_row_and_the_others_go_on():
    comparison = Comparison(tiny.make("llama"), tiny.prompt(1, 24), 20, schedule="both")
    policies = choose_policies("snapkv,h2o", {"protect": list(range(tiny.VOCAB))}, 4)
    rows = comparison.run({name: policies[name] for name in ("snapkv", "h2o")}, {"4": 4, "1B": "1B", "20": 20}).rows
    assert [(row.policy, row.k) for row in rows] == [(p, k) for k in ("4", "1B", "20") for p in ("snapkv", "h2o")]
    assert [row.figures is None for row in rows] == [True] * 5 + [False]
    assert all("schedule='both'" in row.error for row in rows[::2])
    assert "protect= marks 20 tokens" in rows[1].error and "holds no token" in rows[3].error


def test_predictions_that_are_no_numbers(monkeypatch):
    model = tiny.make("llama")
    comparison = Comparison(model, tiny.prompt(1, 20), 16)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    row = comparison._make_row("h2o", kvpatch.get_policy("h2o"), "4", 4)
    assert row.figures is None and "NaN" in row.error
    with pytest.raises(KVPatchError, match="NaN"):
        Comparison(model, tiny.prompt(1, 20), 16)


# ---- what is asked for ----


def test_policies_with_the_options_they_have():
    chosen = choose_policies(" h2o,critical(adaptive(roco)), snapkv,h2o", {"window": 5, "recent": 3}, 77)
    assert list(chosen) == ["random", "h2o", "critical(adaptive(roco))", "snapkv"]
    assert chosen["snapkv"].options()["window"] == 5
    assert all(policy.options()["recent"] == 3 for policy in chosen.values())
    keyformer = choose_policies("keyformer", {}, 77)["keyformer"].options()
    assert keyformer["generation_length"] == 77  # as generate() would tell it
    assert choose_policies("keyformer", {"generation_length": 9}, 77)["keyformer"].options()["generation_length"] == 9
    assert parse_budgets("0.5, 12,2GiB,0.5") == {"0.5": 0.5, "12": 12, "2GiB": "2GiB"}


class Letters:
    """A tokenizer of one token per letter, and one in front of every text."""

    def __call__(self, text, add_special_tokens=True, **kwargs):
        ids = torch.tensor([[1] * add_special_tokens + [max(ord(letter) - 32, 0) for letter in text]])
        return type("Encoding", (), {"input_ids": ids})


def test_the_text_is_prompt_and_continuation():
    model = tiny.make("llama")
    ids, n, notes, _ = read_text(model, Letters(), "0123456789", "ABC", 5)
    assert (ids[0].tolist(), n, notes) == ([1, *range(16, 26), 33, 34, 35], 11, [])
    ids, n, notes, _ = read_text(model, Letters(), "0123456789", "ABC", 2)
    assert (ids.shape[1], n) == (13, 11)
    assert notes == ["The continuation has 3 tokens: the first 2 are fed (--max-new-tokens)."]
    ids, n, notes, _ = read_text(model, Letters(), "0" * 600, "ABC", 5)
    assert (ids.shape[1], n) == (512, 509)
    assert "only the prompt's last 509 tokens are read" in notes[0]
    assert read_text(model, Letters(), "0" * 600, "ABC", 2)[1] == 510  # room for what is fed, not for what is left out
    with pytest.raises(KVPatchError, match="has 7 tokens"):
        read_text(model, Letters(), "012345", "ABC", 5)
    for nothing in ("", "é"):
        with pytest.raises(KVPatchError, match="--continuation-file: the tokenizer makes no tokens"):
            read_text(model, Letters(), "0123456789", nothing, 5)
    with pytest.raises(KVPatchError, match="no room is left"):
        read_text(model, Letters(), "0123456789", "A" * 600, 512)


class Chat(Letters):
    """Letters with a template: a token before the user's text and one behind it."""

    chat_template = "{{ ... }}"

    def apply_chat_template(self, messages, add_generation_prompt, **kwargs):
        (message,) = messages
        assert message["role"] == "user" and add_generation_prompt
        return {"input_ids": torch.tensor([[2, *(max(ord(letter) - 32, 0) for letter in message["content"]), 3]])}


def test_a_prompt_goes_through_the_chat_template_unless_raw():
    model = tiny.make("llama")
    ids, n, *_ = read_text(model, Chat(), "0123456789", "ABC", 5)
    assert (ids[0].tolist(), n) == ([2, *range(16, 26), 3, 33, 34, 35], 12)
    assert torch.equal(
        read_text(model, Chat(), "0123456789", "ABC", 5, raw=True)[0], read_text(model, Letters(), "0123456789", "ABC", 5)[0]
    )


def test_a_question_stands_behind_the_prompt(prompt, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(comparing, "read_text", lambda *given: asked.append(given) or read_text(*given))
    given = ("-k", "0.5", "--policies", "window", "--max-new-tokens", 2, "--out", tmp_path, "--json")
    lines = [run("compare", MODEL, prompt, *given, *more).stdout for more in ((), ("--question", "Who?", "--raw"))]
    text = Path(prompt).read_text()
    assert [(one[2], one[5]) for one in asked] == [(text, False), (f"{text.rstrip()}\n\nWho?", True)]
    said = [json.loads(line.splitlines()[0]) for line in lines]
    assert [(one["question"], one["raw"]) for one in said] == [(None, False), ("Who?", True)]
    result = run("compare", MODEL, prompt, "--question", " ")
    assert result.exit_code == 2 and "--question is empty: give one in quotation marks" in result.stderr


def test_a_question_that_comes_later_is_fed_and_its_answer_counts(prompt, tmp_path):
    """The prompt is the same whatever is asked; KL is over the answer, whose first token the question's last one predicts."""
    model = tiny.make("llama_gqa")
    first, second = (read_text(model, Chat(), "0123456789", None, 4, later=words) for words in ("AB?", "CDEF"))
    assert (first.n, first.asked, second.asked) == (
        11,
        6,
        7,
    )  # two empty lines and the template too
    assert torch.equal(first.ids_1T[:, :11], second.ids_1T[:, :11])
    comparison = Comparison(model, first.ids_1T, first.n, asked=first.asked)
    found = comparison.measure_policy(kvpatch.get_policy("h2o"), 5)
    full = tiny.force(model, first.ids_1T[:, :11], first.ids_1T[:, 11:])[0][0].double().log_softmax(-1)
    with kvpatch.patched(model, "h2o", 5):
        evicted = tiny.force(model, first.ids_1T[:, :11], first.ids_1T[:, 11:])[0][0].double().log_softmax(-1)
    kl = torch.nn.functional.kl_div(evicted, full, log_target=True, reduction="none").sum(-1)
    assert found.kl == pytest.approx(float(kl[6:].mean()), rel=1e-4) != pytest.approx(float(kl[1:].mean()), rel=1e-2)
    rises = (full - evicted)[6:-1].gather(1, first.ids_1T[0, 17:, None])
    assert found.loss == pytest.approx(float(rises.mean()), rel=1e-4)
    assert comparison.result([]).counted == 5
    with pytest.raises(KVPatchError, match="--later: the text and its question do not fit"):
        read_text(model, Letters(), "0" * 600, None, 4, later="AB?")
    given = ("-k", "0.5", "--policies", "window", "--max-new-tokens", 2, "--out", tmp_path)
    result = run("compare", MODEL, prompt, *given, "--later", "Who?", "--json")
    assert [json.loads(line)["later"] for line in result.stdout.splitlines()] == ["Who?"] * 2
    assert "of the question and its own greedy text, of which the answer counts" in result.stderr
    result = run("compare", MODEL, prompt, "--later", " ")
    assert result.exit_code == 2 and "--later is empty: give one in quotation marks" in result.stderr


def test_the_models_own_text_ends_before_its_end():
    model = tiny.make("llama")
    own = read_text(model, Letters(), "0123456789", None, 6)[0][0, 11:].tolist()
    logits = tiny.force(model, torch.tensor([[1, *range(16, 26)]]), torch.tensor([own]))[0]
    assert own == logits[0, :-1].argmax(-1).tolist()  # greedy
    assert own[2] not in own[:2]
    model.generation_config.eos_token_id = own[2]
    assert read_text(model, Letters(), "0123456789", None, 6)[0][0, 11:].tolist() == own[:2]
    model.generation_config.eos_token_id = [own[0]]
    with pytest.raises(KVPatchError, match="ends its text right after this prompt"):
        read_text(model, Letters(), "0123456789", None, 6)


# ---- what is said ----


def one(kl, agreement, nbytes, **more):
    return DivergenceFigures(50, kl, 10 * kl, agreement, 0.1, nbytes, (50, 50), 50.0, **more)


def said(*rows, tolerance=0.05, agreement=0.95):
    return compare_view.write_advice([DivergenceTable(list(rows), 1000, 90, 10, 9)], tolerance, agreement)


GOOD, BETTER = Row("h2o", "0.5", one(0.04, 0.95, 500)), Row("roco", "0.5", one(0.03, 0.97, 500))
BROKEN = Row("tova", "0.5", None, "no")


def test_advice_takes_the_cheapest_and_then_the_nearest():
    cheap = Row("snapkv", "0.3", one(0.05, 0.96, 300))
    assert said(GOOD, BROKEN, cheap, BETTER) == (
        "The cheapest of these settings within a KL of 0.05 nats per token and 95% agreement on this text is snapkv at k=0.3: "
        "30% of the full cache's bytes, a KL of 0.0500 (worst token 0.50), 96.0% agreement. Measured on 9 predicted tokens."
    )
    assert " is roco at k=0.5: " in said(GOOD, BETTER)
    assert " is roco at k=0.5: " in said(GOOD, BETTER, cheap, tolerance=0.04)
    assert " is roco at k=0.5: " in said(GOOD, BETTER, cheap, agreement=0.97)


def test_advice_where_none_is_good_enough():
    assert said(GOOD, BETTER, BROKEN, tolerance=0.01) == (
        "None of these settings stays within a KL of 0.01 nats per token and 95% agreement on this text; the closest is roco "
        "at k=0.5: 50% of the full cache's bytes, a KL of 0.0300 (worst token 0.30), 97.0% agreement. Measured on 9 predicted "
        "tokens."
    )
    assert said(Row("h2o", "0.5", one(0.0, 0.94, 500))).startswith("None of these settings")


def test_advice_is_never_chance_nor_what_saves_nothing():
    nothing = "No setting that holds less than the full cache was measured, so there is none to advise."
    assert said(Row("random", "0.5", one(0.0, 1.0, 500)), Row("full", "0.5", one(0.0, 1.0, 1000)), BROKEN) == nothing
    chance = Row("random", "0.5", one(0.05, 0.95, 500))
    beside = "; chance has a KL of 0.0500 under the same budget"
    assert said(chance, GOOD).endswith(f"{beside}, so this text cannot tell policies apart there.")  # within the limits too
    assert said(chance, GOOD, tolerance=0.045).endswith(f"{beside}.")
    low = Row("random", "0.5", one(0.03, 0.95, 500))
    assert said(low, GOOD, tolerance=0.01).endswith("cannot tell policies apart there.")  # no worse than the closest
    assert said(Row("random", "0.7", one(0.0, 1.0, 700)), GOOD).endswith("Measured on 9 predicted tokens.")


def test_notes():
    rows = [
        Row("snapkv", "0.3", one(0.1, 1.0, 3, cut={"window": (32, 30)})),
        Row("snapkv", "0.2", one(0.1, 1.0, 3, cut={"window": (32, 20)})),
        GOOD,
        BROKEN,
        Row("h2o", "1B", None, "no"),
    ]
    cut, refused = compare_view.list_notes(rows)
    assert cut == (
        "* snapkv protects more than the budget holds, which leaves nothing to choose by score: window 32 cut to 30 at k=0.3, "
        "window 32 cut to 20 at k=0.2."
    )
    assert refused == "refused: tova at k=0.5, h2o at k=1B: no"


def test_advice_over_several_texts():
    """The worst of a setting's figures counts, on every text; bytes are shares of each text's own full cache."""
    first = DivergenceTable([GOOD, BETTER, Row("tova", "0.3", one(0.0, 1.0, 300))], 1000, 90, 10, 9)
    rows = [Row("h2o", "0.5", one(0.01, 0.99, 100)), Row("roco", "0.5", one(0.06, 0.99, 100)), BROKEN]
    second = DivergenceTable(rows, 200, 40, 10, 9)
    assert compare_view.write_advice([first, second], 0.05, 0.95) == (
        "The cheapest of these settings within a KL of 0.05 nats per token and 95% agreement on each of these 2 texts is h2o "
        "at k=0.5: 50% of the full cache's bytes, a KL of at most 0.0400 (worst token 0.40), at least 95.0% agreement. "
        "Measured on 18 predicted tokens."
    )
    assert compare_view.find_best([first, second], 0.05, 0.95) == ("h2o", "0.5", 16)  # tova ran on one text alone
    assert compare_view.find_best([first], 0.05, 0.95) == ("tova", "0.3", 16)
    assert compare_view.find_best([DivergenceTable([BROKEN], 1000, 90, 10, 9)], 0.05, 0.95) is None


def test_the_line_to_paste():
    def line(name, k, *given, **options):
        return compare_view.write_python(name, k, kvpatch.get_policy(name).with_options(**options), *given)

    assert line("h2o", "0.5", None, 0) == 'with kvpatch.patched(model, policy="h2o", k=0.5):'
    assert line("keyformer", "12", None, 0, generation_length=64) == 'with kvpatch.patched(model, policy="keyformer", k=12):'
    assert line("h2o", "2GiB", None, 0, 4) == "with kvpatch.patched(model, policy=\"h2o\", k='2GiB', bits=4):"
    said = line("snapkv", "2GiB", "prompt", 3, window=16, pooling=None)
    assert said == (
        "with kvpatch.patched(model, policy=\"snapkv\", k='2GiB', window=16, pooling=None, schedule='prompt', seed=3):"
    )
    model = tiny.make("llama_gqa")
    for text in (line("critical(adaptive(roco))", "0.5", None, 0, sinks=2), line("snapkv", "9", "prompt", 3, window=4)):
        exec(f"{text}\n    pass", {"kvpatch": kvpatch, "model": model})


def test_options_that_differ():
    policy = kvpatch.get_policy("snapkv").with_options(window=8, kernel=3)
    assert compare_view.find_changes("snapkv", policy) == {"window": 8, "kernel": 3}
    assert compare_view.find_changes("h2o", kvpatch.get_policy("h2o")) == {}


def test_settings_are_those_of_the_line_to_paste():
    policy = kvpatch.get_policy("keyformer").with_options(generation_length=64, recent=2)
    made = compare_view.make_settings("keyformer", "mass:0.9", policy, "prompt", 3, 8)
    options = {"recent": 2, "schedule": "prompt", "seed": 3, "bits": 8}
    assert made == kvpatch.Settings("keyformer", kvpatch.Mass(0.9), options)
    calibrated = kvpatch.get_policy("q_filter").with_options(sinks=3, calibration=Calibration({}, {}, 1, ""))
    assert compare_view.make_settings("q_filter", "9", calibrated, None, 0) == kvpatch.Settings("q_filter", 9, {"sinks": 3})


def test_the_advised_settings_are_written(prompt, tmp_path):
    """Within the limits the cheapest row, else the closest; the line that says so is no part of the JSON."""
    given = ("--policies", "window,h2o", "-k", "9,0.8", "-o", "recent=3", "--max-new-tokens", 3, "--seed", 2, "--out", "found")
    for tolerance, order in ((100, ("nbytes", "kl")), (0, ("kl",))):
        limits = ("--tolerance", tolerance, "--agreement", 0, "--bits", "16,8", "--schedule", "prompt", "--json")
        result = run("compare", MODEL, "prompt.txt", *given, *limits)
        assert result.exit_code == 0, result.output
        rows = [row for row in map(json.loads, result.stdout.splitlines()) if row["policy"] != "random"]
        best = min(rows, key=lambda row: [row[name] for name in order])
        options = {"recent": 3, "schedule": "prompt", "seed": 2} | ({"bits": 8} if best["bits"] == 8 else {})
        wanted = kvpatch.Settings(best["policy"], best["k"], options)
        assert kvpatch.Settings.load(tmp_path / "found" / "settings.json") == wanted
        path = Path("found", "settings.json")
        assert f"The same settings, for kvpatch.Settings.load and --settings: {path}\n" in result.stderr


def test_rows_fit_eighty_columns():
    """Every row of a usual run, told before it is measured: names, budgets and ragged heads decide the widths."""
    names = "window,streaming_llm,h2o,roco,keyformer,tova,snapkv,critical_pyramidkv,critical_adakv"
    lines = compare_view.Lines(choose_policies(names, {}, 64), ["0.7", "1024"], DivergenceTable([], 2**30, 32000, 64, 9))
    ragged = DivergenceFigures(9000, 12.34567, 345.678, 1.0, -12.3456, 2**28, (12345, 32064), 20000.4, {"window": (3, 2)})
    rows = [lines.head, lines.format_full()]
    rows += [lines.format_row(row) for row in (Row("critical_pyramidkv", "1024", ragged), BROKEN)]
    assert all(len(row) <= 80 for row in rows)
    assert len({len(row) for row in rows[:3]}) == 1
    assert rows[2].split() == [
        "critical_pyramidkv", "1024*", "20,000", "12.3457", "345.68", "100%", "-12.346", "25%",
    ]  # fmt: skip


# ---- the command ----


def test_compare(prompt, tmp_path):
    policies = "h2o,critical(adaptive(roco)),snapkv"
    arguments = ("--prompt-file", prompt, "--max-new-tokens", 6, "--dtype", "float32", "--policies", policies)
    result = run("compare", "--model", MODEL, *arguments, "-k", "1.0,0.4,1B", "--json")
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    names = ["random", *policies.split(",")]
    assert [(line["policy"], line["k"]) for line in lines] == [(name, k) for k in ("1.0", "0.4", "1B") for name in names]
    for line in lines[:4]:
        assert line["kl"] < 1e-9 and line["agreement"] == 1.0
    evicted = lines[4:8]
    assert all(line["kl"] > 1e-4 for line in evicted)
    assert all("holds no token" in line["error"] and "kl" not in line for line in lines[8:])
    n = len(load_tokenizer(str(MODEL))(TEXT).input_ids)
    first = lines[0]
    assert (first["prompt_tokens"], first["fed_tokens"], first["continuation"], first["seed"]) == (n, 6, "greedy", 0)
    assert (first["device"], first["dtype"], first["versions"]["kvpatch"]) == ("cpu", "float32", kvpatch.__version__)
    assert first["full_nbytes"] == 4 * 4 * 32 * 2 * 4 * (n + 6)
    assert [line["chance"] for line in evicted] == [True, False, False, False]
    table = [line.split() for line in result.stderr.splitlines() if line.startswith(("full", *names))]
    assert [row[0] for row in table] == ["full", *names * 3]
    kl, worst = f"{evicted[0]['kl']:.4f}", f"{evicted[0]['worst']:.2f}"
    assert table[5][:6] == ["random", "(chance)", "0.4", f"{int(0.4 * n)}", kl, worst]
    assert table[8][1] == "0.4*" and "snapkv protects more than the budget holds" in result.stderr
    assert [row[-1] for row in table[9:]] == ["refused"] * 4
    assert " of these settings " in result.stderr and "One text is one text" in result.stderr
    assert (tmp_path / "kvpatch-compare" / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_compare_bits_at_equal_bytes(prompt):
    """Every budget with each number of bits; the line to paste has the one that is advised."""
    arguments = ("--prompt-file", prompt, "--max-new-tokens", 6, "--policies", "window", "-k", "16KiB", "--bits", "auto")
    result = run("compare", "--model", MODEL, *arguments, "--json", "--tolerance", 100, "--agreement", 0)
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    wanted = [(name, bits) for bits in (16, 8, 4) for name in ("random", "window")]
    assert [(line["policy"], line["bits"]) for line in lines] == wanted
    held = [line["budget"] for line in lines[1::2]]
    assert held[0] < held[1] < held[2] and all(line["nbytes"] < 1.2 * 2**14 for line in lines)
    best = min(lines[1::2], key=lambda line: line["nbytes"])
    assert ("bits=" in result.stderr) == (best["bits"] != 16) and "16KiB, 4 bits" in result.stderr
    for wrong in ("12", "auto,8", ""):
        said = run("compare", "--model", MODEL, *arguments[:-1], wrong)
        assert said.exit_code == 2 and "--bits" in said.stderr


def test_compare_with_a_calibration_and_protected_ids(prompt):
    """The file of a calibration, and the ids, are in the rows and in the line to paste."""
    made = run("calibrate", MODEL, prompt, "--out", "q.safetensors", "--dtype", "float32")
    assert made.exit_code == 0, made.output
    given = ("-k", "0.5", "-o", "calibration=q.safetensors", "-o", "protect=[5]", "--dtype", "float32", "--max-new-tokens", 2)
    result = run("compare", MODEL, prompt, *given, "--policies", "q_filter", "--json", "--tolerance", 100, "--agreement", 0)
    assert result.exit_code == 0, result.output
    _, row = map(json.loads, result.stdout.splitlines())
    assert (row["calibration"], row["options"]["protect"], "calibration" in row["options"]) == ("q.safetensors", [5], False)
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("    with kvpatch")]
    model = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    exec(f"{line.strip()}\n    pass", {"kvpatch": kvpatch, "model": model})


def test_compare_budgets_that_follow_the_text(prompt):
    """A row holds what the library's own Mass holds, the others say why not, and the line to paste has the rule."""
    arguments = ("--prompt-file", prompt, "--max-new-tokens", 6, "--policies", "h2o,window")
    result = run("compare", "--model", MODEL, *arguments, "-k", "mass:0.8", "-o", "recent=4", "--json", "--agreement", 0)
    assert result.exit_code == 0, result.output
    chance, mass, window = map(json.loads, result.stdout.splitlines())
    assert [one["policy"] for one in (chance, mass, window)] == ["random", "h2o", "window"]
    assert all("takes scores for weights" in one["error"] and "kl" not in one for one in (chance, window))
    model, tokenizer = LlamaForCausalLM.from_pretrained(MODEL), load_tokenizer(str(MODEL))
    ids, n, *_ = read_text(model, tokenizer, TEXT, None, 6)
    figures = Comparison(model, ids, n).measure_policy(kvpatch.get_policy("h2o").with_options(recent=4), kvpatch.Mass(0.8))
    assert (mass["kl"], mass["mean_held"]) == (pytest.approx(figures.kl, rel=1e-6), figures.mean_held)
    assert mass["held"][0] < mass["held"][1] <= n, "each head holds what its own scores ask for"
    row = next(line.split() for line in result.stderr.splitlines() if line.startswith("h2o"))
    assert row[1:4] == ["mass:0.8", f"{figures.mean_held:,.0f}", f"{figures.kl:.4f}"]
    line = 'with kvpatch.patched(model, policy="h2o", k=kvpatch.Mass(0.8), recent=4):'
    assert f"    {line}\n" in result.stderr
    exec(f"{line}\n    pass", {"kvpatch": kvpatch, "model": model})


def test_compare_on_a_text_of_ones_own(prompt, tmp_path):
    (tmp_path / "next.txt").write_text("\n\nprint(1)\nprint(2)\n")
    arguments = ("compare", "--model", MODEL, "--prompt-file", prompt, "--continuation-file", "next.txt")
    more = ("--max-new-tokens", 5, "--schedule", "prompt", "--seed", 5, "--json", "--out", "deep/out")
    result = run(*arguments, "--policies", "window", "-k", 9, *more)
    assert result.exit_code == 0, result.output
    assert "then 5 of the continuation" in result.stderr
    assert "the first 5 are fed" in result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["continuation"] for line in lines] == ["file"] * 2
    model, tokenizer = LlamaForCausalLM.from_pretrained(MODEL), load_tokenizer(str(MODEL))
    n = len(tokenizer(TEXT).input_ids)
    fed = tokenizer("\n\nprint(1)\nprint(2)\n", add_special_tokens=False).input_ids[:5]
    ids = torch.tensor([tokenizer(TEXT).input_ids + fed])
    comparison = Comparison(model, ids, n, schedule="prompt", seed=5)
    chance = kvpatch.get_policy("random").with_options(sinks=4, recent=0.25)
    for line, policy in zip(lines, (chance, kvpatch.get_policy("window")), strict=True):
        assert line["kl"] == pytest.approx(comparison.measure_policy(policy, 9).kl, rel=1e-6)
        assert (line["seed"], line["schedule"], line["held"]) == (5, "prompt", [14, 14])
    assert (tmp_path / "deep" / "out" / "compare.png").is_file()


def test_the_picture_has_a_line_per_policy(monkeypatch):
    """Its x is the bytes held at the end: a policy that evicts once holds more than one of the same budget that goes on."""
    drawn = {}
    monkeypatch.setattr(plotting, "draw_divergence", lambda *given: drawn.update(given=given))
    chance = Row("random", "0.5", one(0.2, 0.9, 500))
    low = Row("h2o", "0.2", DivergenceFigures(20, 0.3, 1.0, 0.9, None, 200, (20, 20), 20.0))
    compare_view.draw_picture(DivergenceTable([chance, GOOD, BROKEN, low], 1000, 90, 10, 9), 0.05, "title")
    curves, chance, full, *rest = drawn["given"]
    assert (curves, chance) == ({"random": [(500, 0.2)], "h2o": [(200, 0.3), (500, 0.04)]}, "random")
    assert (full, rest) == (1000, [0.05, "title"])
    monkeypatch.undo()
    axes = plotting.draw_divergence(curves | {"full": [(1000, 0.0)]}, chance, full, *rest).axes[0]
    assert [line.get_label() for line in axes.lines] == ["random (chance)", "h2o", "full", "tolerance, 0.05", "full cache"]
    assert [line.get_linestyle() for line in axes.lines] == ["--", "-", "-", ":", "-"]
    assert axes.get_xlabel() == "keys and values held at the end, KiB"
    assert axes.lines[1].get_xdata().tolist() == [200 / 1024, 500 / 1024]
    low, high = axes.transData.transform([(0.5, 0.0), (0.5, 0.3)])[:, 1]
    assert math.isfinite(low) and axes.bbox.y0 <= low < high < axes.bbox.y1  # zero has a place on the axis
    assert plotting.draw_divergence(curves, chance, full, *rest).axes[0].get_ylim() == (0.02, 0.6)  # and none without a use
    assert plotting.draw_divergence({"full": [(50, 0.0)]}, chance, 50, 0.0, "title").axes[0].get_ylim() == (0.0, 1e-4)


MISTAKES = [
    (["--policies", "h2o,h20"], "Did you mean 'h2o'?"),
    (["--policies", "critical(window)"], "no weight"),
    (["--policies", " ,"], "--policies names none"),
    (["-o", "widow=3"], "--option widow: none of window, streaming_llm, h2o"),
    (["-k", ","], "-k names no budget"),
    (["--prompt-file", "/no/such/file"], "--prompt-file /no/such/file cannot be read"),
    (["--continuation-file", "/no/such/file"], "--continuation-file /no/such/file cannot be read"),
    (["--out", "prompt.txt"], "--out prompt.txt cannot be made"),
    (["no/such/second/file"], "FILE no/such/second/file cannot be read"),
    (["prompt.txt", "--continuation-file", "prompt.txt"], "goes with one prompt, not with 2"),
]


@pytest.mark.parametrize(("wrong", "words"), MISTAKES)
def test_mistakes_cost_one_line_and_no_loading(prompt, monkeypatch, wrong, words):
    monkeypatch.setattr("kvpatch.cli.loading.load_model", None)
    result = run("compare", "--model", MODEL, "--prompt-file", prompt, *wrong)
    assert result.exit_code == 2, result.exception
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("kvpatch: ")
    assert words in line


def test_mistakes_that_the_model_shows(prompt, tmp_path):
    arguments = ("compare", "--model", MODEL, "--prompt-file", prompt)
    long = tmp_path / "long.txt"
    long.write_text("word " * 600)
    (tmp_path / "short.txt").write_text("a b")
    tiny.make("llama").save_pretrained(tmp_path / "bare")
    for wrong, words in (
        (["--max-new-tokens", 512], "the model has 512 positions, so no room is left"),
        (["--continuation-file", long, "--max-new-tokens", 600], "so no room is left for a prompt"),
        (["--max-new-tokens", 509], "The prompt has 3 tokens; with fewer than 8"),
        (["--prompt-file", tmp_path / "short.txt"], "short.txt: The prompt has 2 tokens; with fewer than 8"),
        (["--model", tmp_path / "bare"], "comes without a tokenizer"),
    ):
        result = run(*arguments, *wrong)
        assert result.exit_code == 2, result.output
        assert words in result.stderr.splitlines()[-1]
        assert not result.stdout  # nothing is measured before all is known to be right
    assert "Traceback" not in result.output


def test_compare_reads_several_prompts_in_one_load(prompt, tmp_path, monkeypatch):
    from kvpatch.cli import loading

    loads, real = [], loading.load_model
    monkeypatch.setattr(loading, "load_model", lambda *given, **how: loads.append(given) or real(*given, **how))
    (tmp_path / "second.txt").write_text(TEXT.replace("path", "folder") + "\n" + TEXT)
    given = ("--policies", "window,h2o", "-k", "0.7", "-k", "0.5,0.3", "-o", "recent=3", "--max-new-tokens", 3)
    result = run("compare", MODEL, "prompt.txt", "second.txt", *given)
    assert result.exit_code == 0, result.output
    assert len(loads) == 1
    heads = [line for line in result.stdout.splitlines() if ": a prompt of " in line]
    assert [head.split(":")[0] for head in heads] == ["prompt.txt", "second.txt"]
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith(("window", "h2o"))]
    settings = [[name, k] for k in ("0.7", "0.5", "0.3") for name in ("window", "h2o")]
    assert [row[:2] for row in rows] == 2 * settings
    assert "each of these 2 texts" in result.stdout and "    with kvpatch.patched(model, policy=" in result.stdout
    assert sorted(path.name for path in (tmp_path / "kvpatch-compare").iterdir()) == [
        "compare-1.png", "compare-2.png", "settings.json"
    ]  # fmt: skip
    lines = run("compare", MODEL, "prompt.txt", "second.txt", *given, "--json").stdout.splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == ["prompt.txt"] * 9 + ["second.txt"] * 9
    assert {json.loads(line)["options"]["recent"] for line in lines} == {3}


def test_rows_appear_as_they_are_measured_and_an_interrupt_keeps_them(prompt, monkeypatch):
    """The third setting is interrupted: the rows before it are out, in the table and in JSON."""
    real, asked = Comparison.measure_policy, []

    def figures(self, policy, k, bits):
        asked.append(policy.name)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return real(self, policy, k, bits)

    monkeypatch.setattr(Comparison, "measure_policy", figures)
    given = ("compare", MODEL, "prompt.txt", "--policies", "window,h2o", "-k", "0.5", "--max-new-tokens", 3)
    result = run(*given)
    assert (result.exit_code, asked) == (130, ["random", "window", "h2o"])
    assert [line.split()[0] for line in result.stdout.splitlines()[3:]] == ["full", "random", "window"]
    asked.clear()
    result = run(*given, "--json")
    assert result.exit_code == 130
    assert [json.loads(line)["policy"] for line in result.stdout.splitlines()] == ["random", "window"]
    assert result.stderr.splitlines()[-1] == "kvpatch: interrupted."


def test_a_text_longer_than_the_model_was_trained_on_is_said(prompt, tmp_path):
    (tmp_path / "long.txt").write_text(TEXT * 8)
    given = ("--policies", "window", "-k", "0.5", "--max-new-tokens", 2)
    assert "was trained on 256 tokens at a time" in run("compare", MODEL, "long.txt", *given).stderr
    assert run("compare", MODEL, "prompt.txt", *given).stderr == ""
