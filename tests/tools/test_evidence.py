"""The evidence of a pretrained model: samples that ask for what was read, shared prompts, resumed runs, statistics."""

import json

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import kvpatch
from kvpatch.policies.uses import find_use
from tools.evidence import agents, choices, chooser, claims, page, quotas, refits, report, runs
from tools.evidence.__main__ import app
from tools.evidence.measure import Bench
from tools.evidence.samples import Probe, Sample
from tools.evidence.settings import FULL, NULL, ROWS, UNREAD, Cells, Row, Setting
from tools.evidence.statistics import compare_with_zero, correct_holm, estimate
from tools.evidence.tasks import TASKS, human_eval, instructions, turns
from tools.evidence.tasks.tools import DATA

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TASKS_OF_TEXTS = ("asked", "document", "code", "code-later", "instructions", "lists", "lists-later", "turns")


@pytest.fixture(scope="module")
def tokenizer():
    """A tokenizer that ships with the library, with a chat template."""
    found = AutoTokenizer.from_pretrained("kvpatch/cli/models/llama-python")
    found.chat_template = TEMPLATE
    return found


def make_model(conversation=None):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300 if conversation is None else 2048, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=512, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model():
    return make_model()


def make_sample(name, tokens=60, turns=1, seed=0):
    draw = torch.Generator().manual_seed(seed)
    ids = lambda n: tuple(torch.randint(3, 300, (n,), generator=draw).tolist())  # noqa: E731
    parts = tuple(ids(tokens) for _ in range(turns))
    return Sample(name, parts, (Probe("fact", ids(4), ids(5)), Probe("fact", ids(3), ids(5)), Probe("rest", ids(1), ids(9))))


@pytest.mark.parametrize("task", TASKS_OF_TEXTS)
def test_answers_stand_in_the_prompt_and_samples_share_no_text(tokenizer, task):
    make = TASKS[task].make
    samples = make(tokenizer, 6)
    assert len({sample.digest for sample in samples}) == 6
    starts = set()
    for sample in samples:
        text = tokenizer.decode([token for turn in sample.turns for token in turn])
        starts.add(text[300:360])
        for probe in sample.probes:
            if probe.kind == "next tokens":
                continue
            answer = tokenizer.decode(probe.answer)
            assert answer.lower() in text.lower(), (sample.name, answer)
    assert len(starts) == 6
    assert make(tokenizer, 3) == samples[:3], "another number of samples changes none"


def test_a_later_question_is_not_in_the_prompt(tokenizer):
    for task in ("document", "code-later", "lists-later"):
        for sample in TASKS[task].make(tokenizer, 4):
            text = tokenizer.decode(sample.turns[0])
            assert not any(asks in text for asks in ("Question:", "Repeat the whole", "What is the access code"))
    for task in ("asked", "code", "lists"):
        for sample in TASKS[task].make(tokenizer, 4):
            assert tokenizer.decode(sample.turns[0]).endswith("<assistant>")


@pytest.mark.skipif(not human_eval.DATA.exists(), reason="the package human-eval is not in .models/human-eval")
def test_the_answer_to_a_problem_does_not_repeat_what_it_needs(tokenizer):
    """Neither the other problems nor the asked one's docstring stand behind the prompt."""
    samples = human_eval.make_samples(tokenizer, 4)
    for sample in samples:
        lead, answer = (tokenizer.decode(ids) for ids in (sample.probes[0].lead, sample.probes[0].answer))
        text = tokenizer.decode(sample.turns[0])
        assert lead.count("def ") == 1 and '"""' not in lead and lead.splitlines()[1] in text
        assert answer.strip() and answer not in text and text.count("def ") >= human_eval.SOLVED + 1


def test_a_chat_is_read_turn_by_turn(tokenizer):
    """Each turn begins with the answer to the one before, and brings one code."""
    sample = turns.make_samples(tokenizer, 1)[0]
    texts = [tokenizer.decode(ids) for ids in sample.turns]
    assert len(texts) == turns.TURNS and len(sample.probes) == len(turns.ASKED)
    for n, text in enumerate(texts):
        assert text.count("The access code of") == 1 and text.endswith("<assistant>")
        assert text.startswith("I have read" if n else "<user>") and f"Note number {n + 1}." in text


@pytest.mark.skipif(not DATA.exists(), reason="the package bfcl-eval is not in .models/bfcl")
def test_tool_calls_are_asked_after_the_earlier_turns(tokenizer):
    for sample in TASKS["tools"].make(tokenizer, 3):
        assert len(sample.turns) >= 3 and sample.probes[0].answer


@pytest.mark.parametrize("label", ["h2o", "snapkv", "adakv", "kvzip", NULL, "roco"])
@pytest.mark.parametrize("turns", [1, 3])
def test_shared_prompts_change_no_figure(model, label, turns):
    sample, setting = make_sample("a", turns=turns), Setting(ROWS[label], 0.3)
    shared, alone = (Bench(model, sample, share=share).measure(setting) for share in (True, False))
    assert shared[1] == alone[1] < 1
    for one, other in zip(shared[0], alone[0], strict=True):
        assert one.nats == pytest.approx(other.nats, abs=1e-4) and one.kl == pytest.approx(other.kl, abs=1e-4)
        assert one.kl > 1e-4, "something was evicted"


def test_shared_second_readings_change_no_figure(model):
    """kvzip reads the prompt again: the same at two budgets, and otherwise after another instruction of the same length."""
    bench = Bench(model, make_sample("a"))
    for k, instruction in ((0.5, (5, 6)), (0.3, (5, 6)), (0.3, (7, 8))):
        setting = Setting(Row("kvzip", "kvzip", {"instruction": instruction}), k)
        before = len(bench.known)
        shared, alone = bench.measure(setting), Bench(model, make_sample("a"), share=False).measure(setting)
        assert (len(bench.known) == before) == (k == 0.3 and instruction == (5, 6))
        assert [one.nats for one in shared[0]] == pytest.approx([one.nats for one in alone[0]], abs=1e-4)
        assert [one.kl for one in shared[0]] == pytest.approx([one.kl for one in alone[0]], abs=1e-4)


def test_a_setting_is_measured_on_its_own_prompt(model):
    """Outputs of another prompt of the same length are never replayed."""
    first, second = make_sample("a", seed=1), make_sample("b", seed=2)
    setting = Setting(ROWS["snapkv"], 0.3)
    alone = Bench(model, second).measure(setting)
    Bench(model, first).measure(setting)
    assert Bench(model, second).measure(setting) == alone
    assert not any("forward" in vars(module) for module in model.modules())


def test_everything_held_is_the_full_cache(model):
    bench = Bench(model, make_sample("a"))
    judged, share = bench.measure(Setting(ROWS["h2o"], 1.0))
    assert share >= 1
    for one, full in zip(judged, bench.judged, strict=True):
        assert one.nats == pytest.approx(full.nats, abs=1e-4) and one.kl < 1e-5 and one.agree == 1


def test_a_run_goes_on_where_it_stopped(model, tmp_path):
    samples, path = [make_sample(f"s{i}", seed=i) for i in range(3)], tmp_path / "lines.jsonl"
    cells = [*(Cells(k, 3, (ROWS["h2o"], ROWS[NULL])) for k in (0.2, 0.5)), Cells(0.2, 1, (ROWS["h2o"], ROWS["roco"]))]
    whole = list(runs.measure(model, samples, cells, tmp_path / "whole.jsonl"))
    first = list(runs.measure(model, samples, [Cells(0.2, 2, (ROWS["h2o"],))], path))
    path.write_text(path.read_text() + '{"sample": "cut')
    rest = list(runs.measure(model, samples, cells, path))
    key = lambda line: (line["digest"], line["label"], line["k"])  # noqa: E731
    assert len(first) == 2 * 3 and sorted(map(key, first + rest)) == sorted(map(key, whole)) and len(whole) == 3 * (2 + 4) + 1
    assert {key(line): line for line in first + rest} == {key(line): line for line in whole}
    assert {key(line): line for line in runs.read_lines(path)} == {key(line): line for line in whole}
    assert not list(runs.measure(model, samples, cells, path))


def test_intervals_and_corrections():
    one = estimate([1.0, 2.0, 3.0, 4.0] * 10)
    assert one.mean == 2.5 and 2.1 < one.low < 2.3 and 2.7 < one.high < 2.9
    assert correct_holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert compare_with_zero([0.0] * 5) == 1 and compare_with_zero([1.0] * 20) < 0.001
    assert compare_with_zero([1.0, -1.0] * 10) == 1


def write_lines(path, losses, kinds=("fact",)):
    """losses: per label and budget a list, a figure a sample, which each kind of probe has."""
    with path.open("w") as file:
        for (label, k), values in losses.items():
            for i, nats in enumerate(values):
                found = {kind: {"nats": nats, "right": 0.0, "kl": nats, "agree": 0.0} for kind in kinds}
                line = {"sample": str(i), "digest": str(i), "tokens": 9, "label": label, "k": k, "bytes": k, "kinds": found}
                file.write(json.dumps(line) + "\n")


def test_a_table_marks_what_beats_the_null(tmp_path):
    noise = [0.1 * (i % 3) for i in range(20)]
    losses = {(FULL, 1.0): noise, (UNREAD, 0.0): [4 + x for x in noise], (NULL, 0.2): [2 + x for x in noise]}
    losses |= {
        ("kvzip", 0.2): [1 + 2 * x for x in noise],
        ("random", 0.2): [3 + x for x in noise],
        ("h2o", 0.2): [2 + x for x in noise],
    }
    write_lines(tmp_path / "asked.jsonl", losses)
    results = page.Results(tmp_path, page.USES[0])
    table = page.write_table(results).splitlines()
    assert [line.split("`")[1] for line in table[2:]] == ["kvzip", NULL, "h2o", "random"]
    assert "**1.10" in table[2] and "*3.00" in table[-1] and "**" not in table[-1]
    assert results.kept(("random", 0.2)).mean == pytest.approx(0.25)
    results.lines["random", 0.2].popitem()
    assert results.kept(("random", 0.2)).mean == pytest.approx(0.25)  # of its own samples
    assert results.kept(("tova", 0.2)) is None
    assert "Full cache 0.10, text not read 4.09" in page.describe(results)


def test_a_choice_stands_beside_the_row_that_it_changes(tmp_path):
    rows = choices.list_rows()
    for row in rows.values():
        assert row.beside and row.label not in ROWS and ROWS[choices.base_of(row.label)].policy in row.policy
        kvpatch.Settings(row.policy, choices.K, row.options)  # refuses an option that the policy has not
    losses = {(FULL, 1.0): [0.1] * 20}
    for family in choices.FAMILIES:
        for label in family.variants:
            losses |= {(choices.base_of(label), 0.2): [1.1] * 20, (label, 0.2): [0.6 + 0.01 * (i % 3) for i in range(20)]}
    for name in ("asked", "document"):
        write_lines(tmp_path / f"{name}.jsonl", losses, ("fact", "next tokens"))
    text = choices.write_tables(tmp_path)
    assert text.count("### ") == len(choices.FAMILIES)
    assert "| `h2o` | 1.00 | 1.00 | 1.00 |  |" in text and "nan" not in text
    assert "| `h2o, recent=0.1` | **-0.491 [" in text


def test_a_refit_is_compared_with_what_it_goes_around_where_both_were_measured(tmp_path):
    base, fit = [1.0, 2.0, 3.0, 5.0] * 5, [0.5, 1.0, 3.5, 4.0] * 5
    losses = {(FULL, 1.0): [0.5] * 20, ("snapkv", 0.1): base, ("snapkv", 0.2): base, ("refit(snapkv)", 0.1): fit[:16]}
    write_lines(tmp_path / "asked.jsonl", losses | {("kvzip, 8 bits", 0.1): base, ("refit(kvzip), 8 bits", 0.1): base})
    eight, snapkv = refits.write_table(tmp_path).splitlines()[2:]
    assert "`kvzip, 8 bits` | 0.1 | 2.250 | 2.250 | 0.000 [0.000, 0.000] | 1 | 20 |" in eight
    assert "`snapkv` | 0.1 | 2.250 | 1.750 | -0.500 [" in snapkv and snapkv.endswith("| 16 |")


def test_the_chooser_names_what_the_lines_say(tmp_path):
    noise = [0.1 * (i % 3) for i in range(20)]
    losses = {(FULL, 1.0): noise, (UNREAD, 0.0): [4 + x for x in noise]}
    losses |= {(NULL, k): [3 + x for x in noise] for k in (0.2, 0.3)}
    share, tokens = find_use("question"), find_use("server")
    measured = {(share.policy, share.k): [1 + x for x in noise], (tokens.policy, 0.2): [2 + x for x in noise]}
    write_lines(tmp_path / "asked.jsonl", losses | measured)
    assert chooser.describe_use(tokens, folder=tmp_path) == "at k=0.2: fact asked in the prompt: 50% [50, 50], null 25%"
    said = chooser.describe_use(find_use("question"), folder=tmp_path)
    assert said == "fact asked in the prompt: 75% [75, 75], null 25%"
    assert chooser.describe_use(find_use("long"), folder=tmp_path) == "not measured"
    lines = [(label, f"{i}", kl) for label, kl in (("roco", 0.1), (NULL, 0.2)) for i in range(2)]
    (tmp_path / "answers.jsonl").write_text(
        "".join(json.dumps({"label": label, "sample": sample, "kl": [kl, 3 * kl]}) + "\n" for label, sample, kl in lines)
    )
    wanted = "512 tokens: 0.20 [0.20, 0.20] nats a token from the full cache, null 0.40"
    assert chooser.describe_use(find_use("long"), folder=tmp_path) == wanted
    assert chooser.describe_use(find_use("later"), folder=tmp_path) == "not measured"


def test_old_results_go_before_the_last_message(tokenizer, monkeypatch):
    """All but the newest two of four; calls and messages stay, and every way is measured."""
    texts = ("a = 1", "f(x)\ng(y)<|im_end|>\nthen", "h(z)\nk(w)<|im_end|>\nlast")
    turns = tuple(tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in texts)
    sample = Sample("one", turns, (Probe("call", (5,), (6, 7, 8)),))
    monkeypatch.setattr(agents.tools, "make_samples", lambda tokenizer, count: [sample])
    for name, value in {"STAY": 2, "LEAST": 240, "MOST": 241, "SUMMARY": 9, "BUDGET": 60}.items():
        monkeypatch.setattr(agents, name, value)
    monkeypatch.setattr(agents, "AGAIN", dict(zip(agents.AGAIN, (0, 3, 9), strict=True)))
    (loop,) = agents.make_loops(tokenizer, 1)
    history, last = loop.sample.turns
    assert len(loop.spans) == 4 and loop.dropped == loop.spans[:2]
    left, at = [], 0
    for start, stop in loop.spans:
        left, at = [*left, *history[at:start]], stop
    said = tokenizer.decode([*left, *history[at:], *last])
    assert [said.find(call) for call in ("f(x)", "g(y)", "then", "h(z)", "k(w)", "last")] == sorted(
        said.find(call) for call in ("f(x)", "g(y)", "then", "h(z)", "k(w)", "last")
    )
    assert agents.sentences()[0][:20] in tokenizer.decode(history) and agents.sentences()[0][:20] not in said
    model = make_model(loop)
    ways = agents.measure_loop(model, loop)
    assert set(ways) == set(agents.WAYS) and ways["read anew"]["kl"] == 0 < ways["kept"]["kl"]
    assert ways["forgotten"]["nats"] != ways["kept"]["nats"] != ways["budget"]["nats"]
    assert ways["forgotten"]["bytes"] < ways["kept"]["bytes"] and ways["budget, forgotten"]["bytes"] < ways["kept"]["bytes"]


def test_quotas_are_of_the_instructions(tokenizer, monkeypatch, tmp_path):
    """Spans hold the instructions' words, the system message ends before the user's, and every way is measured once."""
    (sample,) = instructions.make_samples(tokenizer, 1)
    system, spans = quotas.find_spans(tokenizer, 0)
    rules, said = instructions.write_system(0)
    text = sample.turns[0]
    assert said in tokenizer.decode(text[:system]) and "Here is a text" not in tokenizer.decode(text[:system])
    assert tokenizer.decode(text[system : system + 20]).find("Here is a text") > 0
    for (start, stop), (topic, words) in zip(spans, rules, strict=True):
        assert tokenizer.decode(text[start:stop]).strip() == instructions.RULE.format(topic=topic, words=words)
    monkeypatch.setattr(instructions, "make_samples", lambda tokenizer, count: [sample])
    monkeypatch.setattr(quotas, "K", 0.4)  # this tokenizer cuts words into more pieces
    model, path = make_model([sample]), tmp_path / "quotas.jsonl"
    lines = list(runs.append(path, quotas.measure(model, tokenizer, 1, [])))
    assert [(line["policy"], line["way"]) for line in lines[1:]] == [(p, w) for p in quotas.POLICIES for w in quotas.WAYS]
    for policy in quotas.POLICIES:
        assert len({line["worst"] for line in lines if line["policy"] == policy}) == len(quotas.WAYS)
    assert all(line["worst"] >= line["mean"] for line in lines)
    assert list(quotas.measure(model, tokenizer, 1, runs.read_lines(path))) == []


def test_a_table_of_quotas_compares_with_the_policy_alone(tmp_path):
    lines = [
        {"policy": policy, "way": way, "sample": str(i), "digest": str(i), "worst": 9.0 + i - gain}
        for i in range(8)
        for policy, ways in (("full", ["full"]), *((policy, quotas.WAYS) for policy in quotas.POLICIES))
        for gain, way in enumerate(ways)
    ]
    path = tmp_path / "quotas.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = quotas.write_table(path)
    assert "| `snapkv`, alone | 12.500 [" in table and table.endswith("8 samples, k=0.2")
    assert "| `h2o`, protected | 9.500 [" in table and "| -3.000 [-3.000, -3.000] | 0.0" in table


def test_claims_are_corrected_over_the_whole_table(tmp_path):
    noise = [0.3 * (i % 3) for i in range(30)]
    losses = {("h2o", 0.2): [1 + x for x in noise], ("streaming_llm", 0.2): [2.0 - x for x in noise]}
    write_lines(tmp_path / "asked.jsonl", losses | {("roco", 0.2): [1 + x for x in noise]})
    table = claims.write_claims(tmp_path, 0.2).splitlines()
    row = next(line for line in table if line.startswith("| H2O: attention beats recency"))
    assert "**-0.40**" in row and "A fact, the question in the prompt" in table[0] and "The text goes on" not in table[0]
    assert "+0.00" in next(line for line in table if line.startswith("| RoCo: above H2O"))


def test_a_page_says_how_many_samples_there_are(tmp_path, monkeypatch):
    noise = [0.1 * (i % 3) for i in range(20)]
    losses = {(FULL, 1.0): noise, (UNREAD, 0.0): [4 + x for x in noise], (NULL, 0.2): [3 + x for x in noise]}
    losses |= {("snapkv", 0.2): [1 + x for x in noise], ("h2o", 0.2): [3.5 + x for x in noise]}
    write_lines(tmp_path / "asked.jsonl", losses)
    drawn = []
    monkeypatch.setattr(report, "draw", lambda *arguments: drawn.append(arguments))
    report.write_page(tmp_path, tmp_path)
    text = (tmp_path / "results.md").read_text()
    assert "At a fifth of the prompt, 20 samples a use:" in text and len(drawn) == 1
    assert "1. **A fact, the question in the prompt:** the null keeps 25% of the full cache's gain; `snapkv` 75%." in text
    assert "Below it: `h2o` 12%." in text


def test_lines_of_another_model_go_to_a_folder_of_their_own():
    """A line names no model, and what a folder has is not measured again."""
    done = CliRunner().invoke(app, ["run", "document", "--model", "other/model"])
    assert done.exit_code == 2 and "--out" in done.output and "smollm2" in done.output
