"""Text under a budget: scores against hand counts, prompts and their sources, and what the three tasks generate and report."""

import copy
import json
import random
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch

import kvpatch
from kvpatch import KVPatchError
from tools.evaluation import data, runs, templates, textmetrics
from tools.evaluation.generation import Instruct, Reconstruct, Summarize
from tools.evaluation.greedy import generate
from tools.evaluation.task import FULL, PYTHON, Request
from tools.training import tasks, train


@cache
def subject(name):
    return runs.load(name, Request())


@pytest.fixture(autouse=True)
def _no_wordnet(monkeypatch):
    """What is installed on this machine decides nothing here."""
    monkeypatch.setattr(textmetrics, "_wordnet", lambda: None)


# ---- scores ----


def test_scores_are_those_of_a_hand_count():
    found = textmetrics.scores("the cat sat on the mat", ["the cat lay on a mat"])
    # shared: the, cat, on, mat of six words each; one pair of five; "the cat on mat" in order
    assert found["rouge1"] == pytest.approx(4 / 6)
    assert found["rouge2"] == pytest.approx(1 / 5)
    assert found["rougeL"] == pytest.approx(4 / 6)
    # no run of three or four: sacrebleu counts 1/2 and 1/4 of a hit
    assert found["bleu"] == pytest.approx((4 / 6 * 1 / 5 * (1 / 2) / 4 * (1 / 4) / 3) ** 0.25)
    assert list(found) == ["rouge1", "rouge2", "rougeL", "bleu"]


def test_order_matters_to_rouge_l_and_stems_count():
    assert textmetrics.scores("b a c", ["a b c"])["rougeL"] == pytest.approx(2 / 3)
    assert textmetrics.scores("b a c", ["a b c"])["rouge1"] == 1.0
    assert textmetrics.scores("jumping dogs", ["dog jumped"])["rouge1"] == 1.0


def test_each_score_takes_its_best_reference():
    text = "one two three four"
    assert textmetrics.scores(text, ["nine", text, "eight"]) == pytest.approx(dict.fromkeys(textmetrics.names(), 1.0))
    mixed = textmetrics.scores(text, ["four three two one", "one two five six"])
    assert mixed["rouge1"] == 1.0  # of the first
    assert mixed["rouge2"] == pytest.approx(1 / 3)  # of the second


def test_an_empty_text_scores_nothing_and_an_empty_reference_is_an_error():
    assert textmetrics.scores(" \n", ["a word"]) == dict.fromkeys(("rouge1", "rouge2", "rougeL", "bleu"), 0.0)
    for references in ([], [""], ["a word", " "]):
        with pytest.raises(KVPatchError, match=r"'lines 7' has an empty reference"):
            textmetrics.scores("a word", references, "lines 7")


def test_meteor_where_wordnet_is(monkeypatch):
    class NoSynonyms:
        def synsets(self, word):
            return []

    monkeypatch.setattr(textmetrics, "_wordnet", NoSynonyms)
    # three of four words match in two runs: 3/4 less half of (2/3) cubed
    assert textmetrics.scores("a dog ran home", ["a dog went home"])["meteor"] == pytest.approx(0.75 * (1 - 0.5 * (2 / 3) ** 3))
    assert textmetrics.scores("", ["a dog"])["meteor"] == 0.0
    assert textmetrics.names()[-1] == "meteor"


def test_what_is_not_installed_is_said(monkeypatch, capsys):
    monkeypatch.undo()
    textmetrics._wordnet.cache_clear()
    textmetrics._rouge.cache_clear()

    class Missing:
        def ensure_loaded(self):
            raise LookupError("no corpora/wordnet in any of ten folders")

    monkeypatch.setitem(sys.modules, "nltk.corpus", SimpleNamespace(wordnet=Missing()))
    assert "meteor" not in textmetrics.names()
    assert "meteor" not in textmetrics.scores("a", ["a"])
    assert capsys.readouterr().err.count("python -m nltk.downloader wordnet") == 1
    textmetrics._wordnet.cache_clear()
    textmetrics._rouge.cache_clear()
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(KVPatchError, match=r"rouge-score: pip install rouge-score"):
        textmetrics.scores("a", ["a"])


# ---- data ----


def write(path, *lines):
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return str(path)


def test_rows_of_a_file(tmp_path):
    name = write(
        tmp_path / "own.jsonl",
        {"prompt": "p", "input": "not this", "references": ["r", "s"]},
        "",
        {"article": "a", "highlights": "h", "id": 3},
        {"document": "d", "references": None},
        {"instruction": "i", "output": "o"},
    )
    found = data.rows(name, 9)
    wanted = [("p", ("r", "s")), ("a", ("h",)), ("d", ()), ("i", ("o",))]
    assert [(row.prompt, row.references) for row in found] == wanted
    assert [row.where for row in found] == [f"{name}, line {line}" for line in (1, 3, 4, 5)]
    assert len(data.rows(name, 2)) == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "a"', r"own\.jsonl, line 2, is no JSON: .* column"),
        ('["a"]', r"line 2, is no JSON object such as"),
        ({"text": "a", "id": 1}, r"line 2, has no field 'prompt' \(or .*\)\. It has: text, id\."),
        ({"input": "a", "article": "b"}, r"line 2, has the fields article and input: name the one"),
        ({"prompt": 3}, r"line 2: field 'prompt' must be a string, not int"),
        ({"prompt": " "}, r"line 2: field 'prompt' is empty"),
        ({"prompt": "a", "references": []}, r"line 2: field 'references' is empty"),
        ({"prompt": "a", "references": ["b", ""]}, r"line 2: field 'references' is empty, or one of"),
        ({"prompt": "a", "references": [1]}, r"line 2: field 'references' must be a string or a list"),
    ],
)
def test_what_is_wrong_with_a_line_is_said(tmp_path, line, said):
    with pytest.raises(KVPatchError, match=said):
        data.rows(write(tmp_path / "own.jsonl", {"prompt": "fine"}, line), 9)


def test_what_is_wrong_with_a_file_is_said(tmp_path):
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "\u00e9"}'.encode("latin-1"))
    for name, said in [
        (write(tmp_path / "none.jsonl"), r"none\.jsonl is empty: it needs"),
        (str(tmp_path / "latin.jsonl"), r"is no UTF-8 text \(byte 12\)"),
        (str(tmp_path / "gone.jsonl"), r"gone\.jsonl cannot be read: No such file"),
        (str(tmp_path / "own.csv"), r"own\.csv is no file ending in .* none of cnn_dailymail"),
    ]:
        with pytest.raises(KVPatchError, match=said):
            data.rows(name, 9)


def test_documents_of_files_and_folders(tmp_path):
    (tmp_path / "sub").mkdir()
    for name, text in (("b.txt", "bee"), ("a.py", "x = 1"), ("sub/c.md", "sea"), ("d.bin", "no"), ("e.txt", " ")):
        (tmp_path / name).write_text(text)
    assert data.documents(str(tmp_path)) == ["x = 1", "bee", "sea"]
    assert data.documents(str(tmp_path), 2) == ["x = 1", "bee"]
    assert data.documents(str(tmp_path / "b.txt")) == ["bee"]
    assert [row.prompt for row in data.rows(str(tmp_path), 2)] == ["x = 1", "bee"]
    name = write(tmp_path / "own.jsonl", {"text": "one"}, {"text": "two"})
    assert data.documents(name) == ["one", "two"]
    with pytest.raises(KVPatchError, match="line 1, has no field 'text'"):
        data.documents(write(tmp_path / "own.jsonl", {"prompt": "a"}))
    (tmp_path / "empty").mkdir()
    with pytest.raises(KVPatchError, match=r"empty holds no text: .*\.txt"):
        data.documents(str(tmp_path / "empty"))


HUB = {
    "cnn_dailymail": ({"article": "A", "highlights": "H"}, "A", ("H",)),
    "xsum": ({"document": "D", "summary": "S"}, "D", ("S",)),
    "gov_report": ({"report": "R", "summary": "S"}, "R", ("S",)),
    "alpaca_eval": ({"instruction": "I", "output": "O"}, "I", ("O",)),
    "soda": ({"narrative": "N", "dialogue": ["a", "b", "c"]}, "N\na\nb", ("c",)),
    "openwebtext": ({"text": "T"}, "T", ()),
}


@pytest.mark.parametrize("name", HUB)
def test_data_sets_of_the_hub_by_name(monkeypatch, name):
    row, prompt, references = HUB[name]
    asked = []

    def load_dataset(path, config, *, split, streaming, **more):
        asked.append((path, config, split, streaming))
        return iter([row] * 5)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    found = data.rows(name, 2)
    assert [(one.prompt, one.references) for one in found] == [(prompt, references)] * 2
    assert asked == [(data.HUB[name].path, data.HUB[name].config, data.HUB[name].split, True)]
    assert set(HUB) == set(data.HUB)
    if name == "openwebtext":
        assert data.documents(name, 3) == ["T"] * 3


def test_a_hub_that_cannot_be_reached_is_said(monkeypatch):
    def load_dataset(*args, **more):
        raise ConnectionError("\nCouldn't reach the Hub\nand more")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(KVPatchError, match=r"xsum cannot be loaded from the hub \(Couldn't reach the Hub\): save the rows"):
        data.rows("xsum", 2)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(KVPatchError, match=r"needs the package datasets: pip install datasets"):
        data.rows("xsum", 2)


# ---- templates ----


def framed(name, tokenizer=None, **asked):
    around = templates.frame(name, tokenizer, **asked)
    return f"{around.before}TEXT{around.after}"


def test_templates_are_the_papers():
    assert framed("wizardlm") == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nTEXT\n\n### Response:"
    )
    asked = {"instruction": "Summarize the following news article:", "cue": "Summary:"}
    assert framed("alpaca", **asked) == (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nSummarize the following news article:"
        "\n\n### Input:\nTEXT\n\n### Response:"
    )
    assert framed("alpaca") == framed("wizardlm")
    assert framed("zephyr", **asked) == (
        "<|system|>\nYou are a friendly chatbot who always responds in a helpful and detailed manner to the user's "
        "questions.</s>\n<|user|>\nSummarize the following news article:\n\nTEXT</s>\n<|assistant|>\n"
    )
    llama = framed("llama2-chat")
    assert llama.startswith("[INST] <<SYS>>\nYou are a helpful, respectful and honest assistant. Always answer as")
    assert llama.endswith("please don't share false information.\n<</SYS>>\nTEXT[/INST]")
    assert framed("none", **asked) == framed(None, **asked) == "Summarize the following news article:\n\nTEXT\n\nSummary:"
    assert framed("auto", SimpleNamespace(chat_template=None)) == "TEXT"
    with pytest.raises(KVPatchError, match=r"template=zephir is unknown\. Did you mean 'zephyr'\? Known: auto"):
        framed("zephir")


def test_auto_is_the_tokenizers_own_template():
    def apply_chat_template(messages, tokenize, add_generation_prompt):
        assert not tokenize and add_generation_prompt
        return f"<s>[{messages[0]['role']}] {messages[0]['content']} [/user]"

    own = SimpleNamespace(chat_template="own", apply_chat_template=apply_chat_template)
    assert framed("auto", own, instruction="Do:", cue="Done:") == "<s>[user] Do:\n\nTEXT [/user]"
    assert not templates.frame("auto", own).special  # the template has written <s> itself
    assert templates.frame("zephyr", own).special
    for wrong in (lambda *a, **k: 1 / 0, lambda *a, **k: "no message"):
        with pytest.raises(KVPatchError, match=r"chat template .*: give -o template=none"):
            templates.frame("auto", SimpleNamespace(chat_template="own", apply_chat_template=wrong))


def test_a_prompt_is_encoded_as_one_text():
    code, python = "def f(x):\n    return x", subject(PYTHON)
    whole = [0, *python.tokenizer(code).input_ids]
    for cut in range(len(code)):
        ids, split = templates.encode(python, templates.Frame("", ""), code[:cut], code[cut:])
        assert ids == whole
        # the tail is whole: no token of it begins before the cut ends
        assert code[:cut].startswith(python.tokenizer.decode(ids[1:split]))
        assert len(python.tokenizer.decode(ids[1 : split + 1])) > cut
    ids, split = templates.encode(python, templates.Frame("# ", "!"), code)
    assert python.tokenizer.decode(ids[1:]) == f"# {code}!"
    assert python.tokenizer.decode(ids[1:split]) == f"# {code}"


def test_a_long_prompt_loses_its_middle():
    python, ids = subject(PYTHON), list(range(600))  # 512 positions
    for split, kept in ((600, 412), (580, 392), (400, 212), (300, 206), (100, 100)):
        found, at = templates.fit(python, ids, 100, split)
        assert found == [*range(206), *range(394, 600)]
        assert at == kept == sum(token < split for token in found)
    assert templates.fit(python, ids, 99)[0] == [*range(206), *range(394, 600)]  # 413: halves are alike
    assert templates.fit(python, ids[:412], 100) == (ids[:412], 412)
    assert templates.fit(python, ids[:450], 100)[0] == [*range(206), *range(244, 450)]
    with pytest.raises(KVPatchError, match="max_new_tokens=511: llama-python has 512 positions"):
        templates.fit(python, ids, 511)


# ---- the tasks ----


def naive(model, ids, new, patch):
    """Greedy, one row, one forward after another."""
    with torch.no_grad():
        out, tokens = model(torch.tensor([ids]), use_cache=True), []
        for _ in range(new):
            tokens.append(int(out.logits[0, -1].argmax()))
            if tokens[-1] == model.config.eos_token_id:
                break
            out = model(torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True)
    return tokens


def naive_rouge_l(mine, wanted):
    best = Counter()
    for i, a in enumerate(mine):
        for j, b in enumerate(wanted):
            best[i, j] = best[i - 1, j - 1] + 1 if a == b else max(best[i - 1, j], best[i, j - 1])
    return 2 * best[len(mine) - 1, len(wanted) - 1] / (len(mine) + len(wanted))


def measured(task, name, setting, samples, seed=0, **asked):
    return list(task.run(subject(name), setting, samples, Request(**asked), seed))


def setting_of(task, name, policy, k, **options):
    found = task.settings(Request(policies=(policy,), budgets=(k,), options=options), subject(name))
    assert found[0] is FULL
    return found[1]


@pytest.mark.parametrize("name", ["llama-0", "gpt2-0"])
@pytest.mark.parametrize(("kind", "policy"), [(Summarize, "snapkv"), (Reconstruct, "h2o")])
def test_text_and_scores_are_those_of_a_loop(name, kind, policy):
    task, one = kind(), subject(name)
    samples = task.samples(one, Request(count=2, options={"max_new_tokens": 12}), 0)
    setting = setting_of(task, name, policy, 0.3)
    assert setting.options["schedule"] == "prompt"
    differs = False
    for values, sample in zip(measured(task, name, setting, samples), samples, strict=True):
        asked = sample.data
        full = naive(one.model, asked.ids, asked.new, None)
        with setting.patched(one.model):
            tokens = naive(one.model, asked.ids, asked.new, None)
        words, wanted = ([tasks.WORDS[token] for token in row] for row in (tokens, full))
        assert values["text"] == " ".join(words)
        assert values["rougeL"] == pytest.approx(naive_rouge_l(words, wanted))
        assert values["rouge1"] == pytest.approx((Counter(words) & Counter(wanted)).total() / len(words))
        assert values["agree"] == sum(a == b for a, b in zip(words, wanted, strict=True)) / len(words)
        assert values["ref_rougeL"] == pytest.approx(naive_rouge_l(words, asked.references[0].split()))
        assert len(words) == 12
        differs |= words != wanted
    assert differs


def test_synthetic_samples_are_rows_of_the_tasks():
    one = subject("llama-0")
    for kind, batch in (
        (Summarize, tasks.summary(random.Random("summarize 3"), 2, in_prompt=True)),
        (Reconstruct, tasks.copy(random.Random("reconstruct 3"), 2)),
    ):
        samples = kind().samples(one, Request(count=2), 3)
        assert [sample.data.ids for sample in samples] == batch.prompt_BT.tolist()
        assert [sample.n for sample in samples] == [batch.prompt_length] * 2
        tails = [" ".join(tasks.WORDS[token] for token in row) for row in batch.continuation_BT.tolist()]
        assert [sample.data.references for sample in samples] == [(tail,) for tail in tails]
        assert {sample.data.new for sample in samples} == {batch.continuation_BT.shape[1]}
        assert len({sample.digest for sample in samples}) == 2


def test_full_scores_one_against_itself_and_is_compared_with_references():
    task, one = Summarize(), subject("llama-0")
    samples = task.samples(one, Request(count=2), 0)
    wrong = replace(samples[0], data=replace(samples[0].data, references=("m1",)))
    values = measured(task, "llama-0", FULL, [wrong, samples[1]])
    for line in values:
        assert [line[name] for name in ("rouge1", "rouge2", "rougeL", "bleu", "agree")] == [1.0] * 5
    assert values[0]["ref_rouge1"] == pytest.approx(2 / 13)  # one word of twelve and of one
    words = values[1]["text"].split(), samples[1].data.references[0].split()
    assert values[1]["ref_rougeL"] == pytest.approx(naive_rouge_l(*words))
    assert {name for line in values for name in line} - {"text"} <= set(task.metrics)


def test_a_run_that_goes_on_gives_the_same_lines():
    """The full cache's text is made again, and noise does not depend on which rows run together."""
    task, one = Summarize(), subject("llama-0")
    samples = task.samples(one, Request(count=12), 0)
    setting = setting_of(task, "llama-0", "keyformer", 0.2)
    whole = measured(task, "llama-0", setting, samples)
    assert measured(Summarize(), "llama-0", setting, samples[5:], batch=3) == whole[5:]
    assert measured(task, "llama-0", setting, samples, seed=1) != whole


def test_samples_under_random_do_not_all_lose_the_same_places():
    """Every eight samples share their noise, whatever runs together."""
    task, one = Summarize(), subject("llama-0")
    samples = task.samples(one, Request(count=9, options={"max_new_tokens": 4}), 0)
    first, last = samples[0], replace(samples[8], data=replace(samples[0].data, draw=samples[8].data.draw), digest="other")
    for policy, same in (("h2o", True), ("random", False)):
        found = measured(task, "llama-0", setting_of(task, "llama-0", policy, 0.3), [first, last])
        assert (found[0] == found[1]) == same


@pytest.mark.slow
def test_instruct_evicts_generated_tokens_alone():
    task, one = Instruct(), subject(PYTHON)
    request = Request(count=2, options={"max_new_tokens": 24})
    samples = task.samples(one, request, 0)
    for sample in samples:
        ids = sample.data.ids
        assert (len(ids), ids[0], sample.n) == (128, one.tokenizer.bos_token_id, 128)
        text = one.tokenizer.decode(ids[1:]) + sample.data.references[0]
        assert any(text in source for source in train.python_sources(held_out=True))
        assert len(one.tokenizer(sample.data.references[0]).input_ids) == 24
    setting = setting_of(task, PYTHON, "h2o", 4)
    assert setting.options == {"schedule": "decode"}
    found = measured(task, PYTHON, setting, samples)
    for values, sample in zip(found, samples, strict=True):
        with kvpatch.patched(one.model, "h2o", 4, schedule="decode"):
            decode = naive(one.model, sample.data.ids, 24, None)
        assert values["text"] == one.tokenizer.decode(decode, skip_special_tokens=True)
    assert any(values["agree"] < 1 for values in found)  # twenty of 24 were evicted
    assert not {"snapkv", "adakv", "critical_snapkv", "critical_adakv"} & set(task.policies)
    with pytest.raises(KVPatchError, match="schedule='decode': policy 'snapkv' scores tokens by the prompt's last rows"):
        measured(task, PYTHON, setting_of(task, PYTHON, "snapkv", 4), samples)


def without(one, token, other=None):
    """The subject with another special token, or without it."""
    tokenizer = copy.deepcopy(one.tokenizer)
    setattr(tokenizer, token, other)
    return replace(one, tokenizer=tokenizer)


def test_prompts_of_the_users_own(tmp_path):
    """Prompts of different lengths, padded side by side, give what each gives alone."""
    one, prompts = subject(PYTHON), ["import os\nimport sys\n\n\ndef main(", "class Node:\n    def __init__(self"]
    name = write(tmp_path / "own.jsonl", {"prompt": prompts[0]}, {"prompt": prompts[1], "references": "self.x = 1"})
    options = {"max_new_tokens": 8}
    for kind, instruction, cue in (
        (Summarize, "Summarize the following news article:\n\n", "\n\nSummary:"),
        (Instruct, "", ""),
    ):
        task = kind()
        samples = task.samples(one, Request(data=name, options=options), 0)
        assert [one.tokenizer.decode(sample.data.ids[1:]) for sample in samples] == [f"{instruction}{p}{cue}" for p in prompts]
        assert len({sample.n for sample in samples}) == 2
        setting = setting_of(task, PYTHON, "h2o", 5)
        values = measured(task, PYTHON, setting, samples)
        # padding that cannot be told from the end of a text
        assert list(task.run(without(one, "pad_token"), setting, samples, Request(), 0)) == values
        assert values == [measured(kind(), PYTHON, setting, [sample])[0] for sample in samples]
        assert ["ref_rougeL" in line for line in values] == [False, True]
        for line, sample in zip(measured(task, PYTHON, FULL, samples), samples, strict=True):
            alone = naive(one.model, sample.data.ids, 8, None)
            assert line["text"] == one.tokenizer.decode(alone, skip_special_tokens=True)
    samples = Reconstruct().samples(one, Request(data=name, options=options), 0)
    assert [sample.data.references for sample in samples] == [(p,) for p in prompts]
    samples = Summarize().samples(one, Request(data=name, options=options | {"template": "alpaca"}), 0)
    assert one.tokenizer.decode(samples[0].data.ids).endswith(f"### Input:\n{prompts[0]}\n\n### Response:")


def test_a_text_ends_where_the_model_ends_it(monkeypatch):
    task, one = Summarize(), subject("llama-0")
    samples = task.samples(one, Request(count=2), 0)
    prompts = [sample.data.ids for sample in samples]
    whole = generate(one, prompts, 12)
    assert [len(row) for row in whole] == [12, 12]
    fourth = whole[0][3]
    assert fourth not in whole[0][:3] + whole[1]  # only the first row ends
    monkeypatch.setattr(one.model.generation_config, "eos_token_id", [fourth, 1])
    assert generate(one, prompts, 12) == [whole[0][:4], whole[1]]
    again = measured(Summarize(), "llama-0", FULL, samples)
    assert again[0]["text"].split() == [tasks.WORDS[token] for token in whole[0][:4]]
    assert again[0]["ref_rougeL"] == pytest.approx(2 * 4 / (4 + 12))
    monkeypatch.setattr(one.model.generation_config, "eos_token_id", None)
    assert generate(without(one, "eos_token", tasks.WORDS[fourth]), prompts, 12) == [whole[0][:4], whole[1]]


def test_long_prompts_are_cut_and_that_is_said(tmp_path, capsys):
    name = write(tmp_path / "own.jsonl", {"prompt": "x = 1\n" * 400}, {"prompt": "x"})
    samples = Instruct().samples(subject(PYTHON), Request(data=name, options={"max_new_tokens": 112}), 0)
    assert samples[0].n == 400
    assert "1 of 2 prompts are longer than llama-python's 512 positions less 112 new tokens" in capsys.readouterr().err


def test_what_a_task_cannot_do_is_said():
    bare = replace(subject("llama-0"), tokenizer=None)
    for task in (Summarize(), Reconstruct(), Instruct()):
        with pytest.raises(KVPatchError, match=f"llama-0 has no tokenizer, and {task.name} needs text"):
            task.samples(bare, Request(), 0)
        other = subject("llama-0" if task.name == "instruct" else PYTHON)
        with pytest.raises(KVPatchError, match=rf"{task.name}.*: give --data FILE\.jsonl"):
            task.samples(other, Request(), 0)
        for wrong in (0, "many", True):
            with pytest.raises(KVPatchError, match=f"-o max_new_tokens={wrong} must be a number of tokens"):
                task.samples(subject(PYTHON), Request(data="any", options={"max_new_tokens": wrong}), 0)
    with pytest.raises(KVPatchError, match="schedule='never' must be one of"):
        task = Summarize()
        samples = task.samples(subject("llama-0"), Request(count=1), 0)
        measured(task, "llama-0", setting_of(task, "llama-0", "h2o", 0.5, schedule="never"), samples)
