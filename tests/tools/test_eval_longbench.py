"""LongBench under a budget: its measures against hand counts, its prompts word for word, its two scenarios, its data."""

import json
import sys
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch

import kvpatch
from kvpatch import KVPatchError
from tools.evaluation import longbench_sets, runs, textmetrics
from tools.evaluation.longbench import LongBench
from tools.evaluation.longbench_sets import SETS
from tools.evaluation.task import FULL, PYTHON, Request
from tools.training import train


@cache
def subject(name=PYTHON):
    return runs.load(name, Request())


def row_of(name, **fields):
    row = {"input": f"question of {name}", "context": f"context of {name}", "answers": ["alpha", "beta 7"], "length": 3}
    return row | {"dataset": name, "language": "en", "all_classes": None, "_id": "0"} | fields


def write(folder, name, *rows):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def measured(setting, samples, **asked):
    return list(LongBench().run(subject(), setting, samples, Request(**asked), 0))


def setting_of(policy, k, **options):
    return LongBench().settings(Request(policies=(policy,), budgets=(k,), options=options), subject())[1]


# ---- measures ----


@pytest.mark.parametrize(
    ("prediction", "truth", "score"),
    [
        ("The Eiffel Tower, in Paris!", "an eiffel tower", 2 * 2 / (4 + 2)),
        ("a b b", "B b c", 2 * 2 / (2 + 3)),  # "a" is an article, and b counts twice
        ("U.S.A.", "usa", 1.0),
        ("theatre another", "atre other", 0.0),  # articles are words, not letters
        ("no", "yes", 0.0),
        ("", "yes", 0.0),
        ("the", "a", 0.0),
    ],
)
def test_f1_of_answers(prediction, truth, score):
    assert textmetrics.qa_f1(prediction, truth) == pytest.approx(score)


@pytest.mark.parametrize(
    ("prediction", "truth", "score"),
    [("b a c", "a b c", 2 / 3), ("a b c d", "a c", 2 * 0.5 * 1 / 1.5), ("dogs", "dog", 0.0), ("", "a", 0.0), (".", "a", 0.0)],
)
def test_rouge_l_of_summaries(prediction, truth, score):
    assert textmetrics.rouge_l(prediction, truth) == pytest.approx(score, abs=1e-6)


CLASSES = ["Definition of something", "something", "Animal", "Food"]


@pytest.mark.parametrize(
    ("prediction", "score"),
    [
        ("Definition of something", 1.0),  # "something" is a part of the right name
        ("Animal or Definition of something", 1 / 2),
        ("Food, Animal, Definition of something", 1 / 3),
        ("something", 0.0),
        ("Animal", 0.0),
        ("definition of something", 0.0),
        ("", 0.0),
    ],
)
def test_classification(prediction, score):
    assert textmetrics.classification(prediction, "Definition of something", CLASSES) == pytest.approx(score)


def test_numbers_of_paragraphs_and_counts():
    assert textmetrics.retrieval("Paragraph 3, or 4, or 3", "Paragraph 3") == pytest.approx(2 / 3)
    assert textmetrics.retrieval("13", "Paragraph 3") == 0.0
    assert textmetrics.retrieval("three", "Paragraph 3") == 0.0
    assert textmetrics.count("12 and 7", "7") == 1 / 2
    assert textmetrics.count("There are 7.", "7") == 1.0
    assert textmetrics.count("none", "7") == 0.0


@pytest.mark.parametrize(
    ("prediction", "truth", "score"),
    [
        ("\n\nx = 1\ny = 2", "x = 2", 0.8),  # four of five characters on both sides
        ("# a note\n`fence`\n// more\nx = 1", "x = 1", 1.0),
        ("abc", "abd", 0.67),  # whole percents
        ("x = 1  # a note", "x = 1", 0.0),
        ("", "x", 0.0),
        ("\n\n\n", "x", 0.0),
    ],
)
def test_similarity_of_code(prediction, truth, score):
    assert textmetrics.code_similarity(prediction, truth) == score


def test_a_set_scores_in_percent_with_its_best_answer():
    assert SETS["qasper"].score("beta", row_of("qasper")) == pytest.approx(100 * 2 / 3)
    assert SETS["qasper"].score("alpha\nbeta", row_of("qasper")) == pytest.approx(100 * 2 / 3)
    assert SETS["triviaqa"].score("\n\nalpha\nbeta", row_of("triviaqa")) == 100  # one line counts
    classes = {"answers": ["Animal"], "all_classes": CLASSES}
    assert SETS["trec"].score("Animal\nFood", row_of("trec", **classes)) == 100
    assert SETS["samsum"].score("\nalpha\n", row_of("samsum")) == pytest.approx(100, abs=1e-3)
    assert SETS["multi_news"].score("beta\n7", row_of("multi_news")) == pytest.approx(100, abs=1e-3)


# ---- sets ----

TABLE = """
narrativeqa single-document-QA qa_f1 128 chat | qasper single-document-QA qa_f1 128 chat
multifieldqa_en single-document-QA qa_f1 64 chat | hotpotqa multi-document-QA qa_f1 32 chat
2wikimqa multi-document-QA qa_f1 32 chat | musique multi-document-QA qa_f1 32 chat
gov_report summarization rouge_l 512 chat | qmsum summarization rouge_l 512 chat
multi_news summarization rouge_l 512 chat | trec few-shot classification 64 line
triviaqa few-shot qa_f1 32 line | samsum few-shot rouge_l 128 line
passage_count synthetic count 32 chat | passage_retrieval_en synthetic retrieval 32 chat
lcc code code_similarity 64 plain | repobench-p code code_similarity 64 plain
"""


def test_the_sixteen_sets():
    rows = [cell.split() for line in TABLE.split("\n") if line for cell in line.split("|")]
    found = [
        [name, one.domain.replace(" ", "-"), one.measure, str(one.new),
         "chat" if one.template else "line" if one.first_line else "plain"]
        for name, one in SETS.items()
    ]  # fmt: skip
    assert found == rows
    assert not any(one.template and one.first_line for one in SETS.values())
    for name, one in SETS.items():
        assert one.prompt.count("{context}") == 1
        asks = name not in ("gov_report", "multi_news", "passage_count", "lcc")
        assert one.prompt.count("{input}") == asks


def test_prompts_word_for_word():
    head, tail = SETS["qmsum"].parts({"context": "{input} C {context}", "input": "Q"})
    assert head == (
        "You are given a meeting transcript and a query containing a question or instruction. Answer the query in one or "
        "more sentences.\n\nTranscript:\n{input} C {context}"
    )
    assert tail == (
        "\n\nNow, answer the query based on the above meeting transcript in one or more sentences.\n\nQuery: Q\nAnswer:"
    )
    assert SETS["narrativeqa"].prompt.count(" asconcisely as you can") == 2  # LongBench's own spelling, and the paper's
    parts = SETS["repobench-p"].parts({"context": "C", "input": "I"})
    assert parts == ("Please complete the code given below. \nC", "INext line of code:\n")
    assert "".join(SETS["trec"].parts({"context": "C", "input": "I"})) == (
        "Please determine the type of the question below. Here are some examples of questions.\n\nC\nI"
    )


def test_every_set_runs_in_both_scenarios(tmp_path, capsys):
    for name in SETS:
        write(tmp_path, name, row_of(name, all_classes=CLASSES, answers=["Animal", "7", "x = 7"]))
    subject()
    capsys.readouterr()
    request = Request(data=str(tmp_path), options={"max_new_tokens": 3})
    samples = LongBench().samples(subject(), request, 0)
    assert capsys.readouterr().err == ""
    groups = [sample.group for sample in samples]
    assert groups == [
        {"scenario": scenario, "set": name, "domain": one.domain}
        for scenario in ("regular", "context")
        for name, one in SETS.items()
    ]
    assert len({sample.name for sample in samples}) == len({sample.digest for sample in samples}) == 32
    whole, context = samples[:16], samples[16:]
    assert [sample.data.ids for sample in whole] == [sample.data.ids for sample in context]
    for sample, later in zip(whole, context, strict=True):
        head, tail = SETS[sample.data.set].parts(sample.data.row)
        assert subject().tokenizer.decode(sample.data.ids) == f"<bos>{head}{tail}"
        assert sample.n == len(sample.data.ids) == later.n + later.data.question
        assert subject().tokenizer.decode(later.data.ids[: later.n]).startswith(f"<bos>{head}"[:-3])
    for setting in (FULL, setting_of("h2o", 0.5)):
        found = measured(setting, samples)
        for sample, values in zip(samples, found, strict=True):
            assert values["score"] == SETS[sample.data.set].score(values["text"], sample.data.row)
            assert len(values["text"]) > 0
        if setting is FULL:  # nothing is compressed, so nothing depends on when
            assert [values["text"] for values in found[:16]] == [values["text"] for values in found[16:]]


def test_an_answer_that_is_given_scores(tmp_path):
    write(tmp_path, "qasper", row_of("qasper"))
    request = Request(data=str(tmp_path), options={"max_new_tokens": 6, "sets": "qasper", "scenario": "regular"})
    samples = LongBench().samples(subject(), request, 0)
    text = measured(FULL, samples)[0]["text"]
    write(tmp_path, "qasper", row_of("qasper", answers=["nothing of it", text]))
    samples = LongBench().samples(subject(), request, 0)
    assert measured(FULL, samples)[0]["score"] == 100


def test_chat_templates_stand_around_all_but_few_shot_and_code(tmp_path):
    for name in ("qasper", "triviaqa", "lcc"):
        write(tmp_path, name, row_of(name))
    request = Request(data=str(tmp_path), options={"template": "llama2-chat", "scenario": "context", "max_new_tokens": 3})
    for sample in LongBench().samples(subject(), request, 0):
        text = subject().tokenizer.decode(sample.data.ids)
        assert ("<<SYS>>" in text) == text.endswith("[/INST]") == (sample.data.set == "qasper")
        context = subject().tokenizer.decode(sample.data.ids[: sample.n])
        assert "context of" in context and "[/INST]" not in context


def test_a_long_prompt_loses_its_middle_and_keeps_its_question(tmp_path, capsys):
    write(tmp_path, "lcc", row_of("lcc", context="x = 1\n" * 500))
    request = Request(data=str(tmp_path), options={"sets": "lcc"})  # 64 new tokens
    one, other = LongBench().samples(subject(), request, 0)
    whole = [0, *subject().tokenizer("".join(SETS["lcc"].parts(row_of("lcc", context="x = 1\n" * 500)))).input_ids]
    assert one.data.ids == other.data.ids == whole[:224] + whole[-224:]  # 512 - 64
    assert subject().tokenizer.decode(other.data.ids[other.n :]) == "Next line of code:\n"
    assert capsys.readouterr().err.count("1 of 1 prompts are longer than llama-python's 512 positions less 64") == 2


# ---- the scenarios ----


def naive(ids, question, new, patch):
    """Two turns and then token by token, one row; the text, and the cache as it was after the second turn."""
    one = subject()
    with torch.no_grad():
        cache = patch.new_cache()
        one.model(torch.tensor([ids[:-question]]), past_key_values=cache)
        out = one.model(torch.tensor([ids[-question:]]), past_key_values=cache)
        tokens = []
        for _ in range(new):
            tokens.append(int(out.logits[0, -1].argmax()))
            out = one.model(torch.tensor([tokens[-1:]]), past_key_values=cache)
    return one.tokenizer.decode(tokens)


@pytest.mark.parametrize("policy", ["h2o", "critical_adakv"])
def test_the_context_is_compressed_before_the_question_is_seen(monkeypatch, policy):
    samples = LongBench().samples(subject(), Request(count=2, options={"scenario": "context", "max_new_tokens": 4}), 0)[:2]
    assert {sample.group["set"] for sample in samples} == {"lcc (made here)"}
    caches, new_cache = [], kvpatch.Patch.new_cache
    monkeypatch.setattr(kvpatch.Patch, "new_cache", lambda self: caches.append(new_cache(self)) or caches[-1])
    setting = setting_of(policy, 0.3)
    values = measured(setting, samples, batch=1)
    assert len(caches) == 2
    for sample, filled, line in zip(samples, list(caches), values, strict=True):
        n, total = sample.n, len(sample.data.ids)
        with setting.patched(subject().model) as patch, torch.no_grad():
            alone = new_cache(patch)
            subject().model(torch.tensor([sample.data.ids[:n]]), past_key_values=alone)
        for layer in range(4):
            held = [set(head) - {-1} for head in filled.positions(layer)[0].tolist()]
            # what the context alone keeps, and all of the question and of what was written behind it
            before = [set(head) - {-1} for head in alone.positions(layer)[0].tolist()]
            assert sum(map(len, before)) == 4 * int(0.3 * n)
            assert held == [head | set(range(n, total + 3)) for head in before]
        with kvpatch.patched(subject().model, policy, 0.3, **setting.options, turns="first") as patch:
            assert line["text"] == naive(sample.data.ids, sample.data.question, 4, patch)


def test_the_whole_prompt_is_compressed_in_the_regular_scenario():
    sample = LongBench().samples(subject(), Request(count=1, options={"scenario": "regular", "max_new_tokens": 4}), 0)[0]
    setting = setting_of("h2o", 0.3)
    assert setting.options == {"schedule": "prompt"}
    with setting.patched(subject().model), torch.no_grad():
        out, tokens = subject().model(torch.tensor([sample.data.ids]), use_cache=True), []
        for _ in range(4):
            tokens.append(int(out.logits[0, -1].argmax()))
            out = subject().model(torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values)
    assert out.past_key_values.held(0)[0].tolist() == [int(0.3 * sample.n) + 4] * 4
    assert measured(setting, [sample])[0]["text"] == subject().tokenizer.decode(tokens)


def test_rows_that_run_together_give_what_each_gives_alone(tmp_path):
    made = longbench_sets.made("lcc", subject().tokenizer, 3, 0)
    write(tmp_path, "lcc", *(row | {"context": row["context"][40 * i :]} for i, row in enumerate(made)))
    samples = LongBench().samples(subject(), Request(data=str(tmp_path), options={"max_new_tokens": 4}), 0)
    assert len({len(sample.data.ids) for sample in samples}) == 3  # so two are padded
    for setting in (FULL, setting_of("snapkv", 0.3), setting_of("random", 0.3)):
        assert measured(setting, samples) == measured(setting, samples, batch=1)
    later = [replace(sample, data=replace(sample.data, draw=1)) for sample in samples]
    assert measured(setting, later) != measured(setting, samples)


def test_equal_questions_stand_side_by_side(tmp_path):
    write(tmp_path, "qasper", *(row_of("qasper", input=text) for text in ("x y", "x y z w", "x y")))
    samples = LongBench().samples(subject(), Request(data=str(tmp_path), options={"max_new_tokens": 4}), 0)
    assert [sample.name.split("/")[-1] for sample in samples] == ["0", "1", "2", "0", "2", "1"]


def test_schedules():
    assert setting_of("snapkv", 0.3, schedule="own").options == {"window": 8, "kernel": 5}
    assert setting_of("h2o", 0.3, schedule="both").options == {"schedule": "both"}
    samples = LongBench().samples(subject(), Request(count=1, options={"max_new_tokens": 6, "sets": "lcc"}), 0)
    once, always = (measured(setting_of("h2o", 9, schedule=how), samples) for how in ("prompt", "own"))
    assert [line["text"] for line in once] != [line["text"] for line in always]
    assert len(measured(setting_of("snapkv", 0.3, schedule="own"), samples)) == 2
    with pytest.raises(KVPatchError, match="schedule='decode': policy 'snapkv'"):
        measured(setting_of("snapkv", 0.3, schedule="decode"), samples)


# ---- data ----


def test_rows_made_here_are_python_that_was_held_out():
    sources = train.python_sources(held_out=True)
    for name in ("lcc", "repobench-p"):
        rows = longbench_sets.made(name, subject().tokenizer, 6, 0)
        assert rows == longbench_sets.made(name, subject().tokenizer, 6, 0)
        assert rows != longbench_sets.made(name, subject().tokenizer, 6, 1)
        for row in rows:
            assert row.keys() == row_of(name).keys()
            near, begins = (row["context"], "") if name == "lcc" else (row["input"], row["context"])
            behind = f"{near}{row['answers'][0]}\n"
            assert any(behind in source and source.startswith(begins) for source in sources)
            assert len(subject().tokenizer(near).input_ids) == (150 if name == "lcc" else 32)
            assert len(subject().tokenizer(begins).input_ids) == (0 if name == "lcc" else 110)
    samples = LongBench().samples(subject(), Request(count=6, options={"sets": "repobench-p"}), 0)
    assert {sample.group["set"] for sample in samples} == {"repobench-p (made here)"}
    assert len({sample.data.question for sample in samples}) == 2  # None, and one length: questions are batched


def test_sets_that_are_not_there_are_named(tmp_path, capsys):
    write(tmp_path, "lcc", row_of("lcc"), row_of("lcc", input="more"))
    request = Request(data=str(tmp_path), count=1, options={"sets": "qasper, lcc ,trec"})
    assert [sample.data.set for sample in LongBench().samples(subject(), request, 0)] == ["lcc", "lcc"]  # one row, twice
    assert "has no file (NAME.jsonl) of: qasper, trec. Left out." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"context": None}, r"lcc\.jsonl, line 2: field 'context' must be a string, not NoneType"),
        ({"answers": []}, r"line 2: field 'answers' is empty"),
        ({"answers": 7}, r"line 2: field 'answers' must be a string or a list"),
    ],
)
def test_what_is_wrong_with_a_row_is_said(tmp_path, fields, said):
    write(tmp_path, "lcc", row_of("lcc"), row_of("lcc", **fields))
    with pytest.raises(KVPatchError, match=said):
        LongBench().samples(subject(), Request(data=str(tmp_path)), 0)


def test_what_is_wrong_with_a_file_or_a_request_is_said(tmp_path, monkeypatch):
    for name in ("input", "answers", "context"):
        row = row_of("lcc")
        del row[name]
        write(tmp_path, "lcc", row)
        with pytest.raises(KVPatchError, match=rf"lcc\.jsonl, line 1, has no field '{name}'\. It has: .*dataset"):
            LongBench().samples(subject(), Request(data=str(tmp_path)), 0)
    (tmp_path / "lcc.jsonl").write_text('{"input": "a"\n')
    with pytest.raises(KVPatchError, match=r"lcc\.jsonl, line 1, is no JSON"):
        LongBench().samples(subject(), Request(data=str(tmp_path)), 0)
    write(tmp_path, "trec", row_of("trec"))
    for data, options, said in [
        (str(tmp_path), {"sets": "trec"}, r"trec\.jsonl, line 1: field 'all_classes' must be"),
        (str(tmp_path), {"sets": "qasper,musique"}, r"has no qasper\.jsonl, musique\.jsonl: download https://"),
        (str(tmp_path / "gone"), {}, r"gone is no folder: give one with NAME\.jsonl in it, or --data hub"),
        (None, {"sets": "qaspr"}, r"-o sets=qaspr is unknown\. Did you mean 'qasper'\?"),
        (None, {"sets": "lcc,qasper"}, r"Only lcc and repobench-p can be made here\. For qasper: download"),
        (None, {"scenario": "all"}, r"-o scenario=all is unknown: it is regular, context or both"),
        (None, {"max_new_tokens": 600}, r"max_new_tokens=600: llama-python has 512 positions"),
    ]:
        with pytest.raises(KVPatchError, match=said):
            LongBench().samples(subject(), Request(data=data, count=1, options=options), 0)
    with pytest.raises(KVPatchError, match=r"What is made here suits llama-python\. For llama-0: download"):
        LongBench().samples(subject("llama-0"), Request(count=1), 0)


def test_the_hub(monkeypatch):
    asked = []

    def load_dataset(path, name, *, split, streaming):
        asked.append((path, name, split, streaming))
        if name == "qasper":
            raise RuntimeError("Dataset scripts are no longer supported")
        return iter([row_of(name)] * 3)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    request = Request(data="hub", count=2, options={"sets": "lcc", "scenario": "regular"})
    assert len(LongBench().samples(subject(), request, 0)) == 2
    assert asked == [("THUDM/LongBench", "lcc", "test", True)]
    with pytest.raises(KVPatchError, match=r"hub \(Dataset scripts are no longer supported\): download https://.*data\.zip"):
        LongBench().samples(subject(), Request(data="hub", options={"sets": "qasper"}), 0)
