"""Evaluation code that people have: lm-evaluation-harness, sliding perplexity, Trainer.evaluate; without network."""

import importlib
import re
import socket
import sys

import lm_eval
import pytest
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import Trainer, TrainingArguments

import kvpatch
from examples import lm_eval_harness, perplexity_strides
from examples.lm_eval_harness import LOCAL, evaluate, load
from kvpatch.evaluation import lm_eval as harness
from kvpatch.evaluation.lm_eval import KVPatchLM
from kvpatch.storage.settings import OF_PATCH
from tests.helpers import tiny
from tests.helpers.comparing import draw
from tests.oracle import reference


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("a test reached for the network")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)  # which starts pip


@pytest.fixture(scope="module")
def recall():
    return dict(zip(("pretrained", "tokenizer"), load("llama-0"), strict=True))


@pytest.fixture(scope="module")
def python():
    return dict(zip(("pretrained", "tokenizer"), load("llama-python"), strict=True))


def answers(results, task):
    """What the model answered to every request, log-likelihoods as floats."""
    found = [answer[0] for sample in results["samples"][task] for answer in sample["resps"]]
    return [a[0] if isinstance(a, tuple | list) else a for a in found]


def requests(results, task):
    """The arguments of every request: context and continuation, or the text alone, or the prompt and options."""
    return [arguments for sample in results["samples"][task] for arguments in sample["arguments"]]


def close(got, want, atol=2e-4):
    assert got == pytest.approx(want, rel=1e-6, abs=atol)


def by_hand(model, ids, scored, policy, k, block):
    """Log-likelihood of the last `scored` tokens: all are fed block after block through a cache, in passes of their own."""
    with torch.no_grad(), kvpatch.patched(model, policy, k) as patch:
        cache, fed = patch.new_cache(), torch.tensor([ids[:-1]])
        logits = [model(part, past_key_values=cache).logits[0] for part in fed.split(block, 1)]
    log = torch.cat(logits).log_softmax(-1)[-scored:]
    return float(log.gather(1, torch.tensor(ids[-scored:])[:, None]).sum())


# ---- the harness ----


@pytest.mark.parametrize(
    ("model", "tasks"), [("recall", ["kvp_recall", "kvp_answer"]), ("python", ["kvp_names", "kvp_source"])]
)
def test_a_full_budget_gives_the_harness_own_figures(model, tasks, request):
    parts = request.getfixturevalue(model)
    lm = HFLM(**parts, batch_size=4)
    want = evaluate(lm, tasks, limit=2)
    with kvpatch.patched(lm.model, "h2o", 1.0, block=32):
        held = evaluate(lm, tasks, limit=2)
        built = evaluate(HFLM(**parts, batch_size=4), tasks, limit=2)
    for got in (held, built):
        for task in tasks:
            close(answers(got, task), answers(want, task)) if task != "kvp_answer" else None
        assert {t: {m: pytest.approx(v) for m, v in r.items()} for t, r in want["results"].items()} == got["results"]
    if "kvp_answer" in tasks:
        assert answers(held, "kvp_answer") == answers(built, "kvp_answer") == answers(want, "kvp_answer")


def warned(caplog):
    """Warnings of the log of passes."""
    return [record.message for record in caplog.records if record.name == "kvpatch.hooks.run_log"]


def test_without_block_log_likelihoods_are_the_full_caches_and_it_is_said(recall, caplog):
    lm = HFLM(**recall, batch_size=4)
    want = evaluate(lm, ["kvp_recall"], limit=4)
    with kvpatch.patched(lm.model, "h2o", 0.2) as patch:
        got = evaluate(lm, ["kvp_recall"], limit=4)
        assert len(warned(caplog)) == 1, "inside the block, not at its end"
        report = patch.report()
    close(answers(got, "kvp_recall"), answers(want, "kvp_recall"))
    words = warned(caplog)
    assert len(words) == 1 and "[kvpatch] policy 'h2o', k=0.2 does not act in this pass" in words[0] and "block=" in words[0]
    assert report.passes == {"prompt": (4, 0)} and report.dropped == 4 and not report.acted
    assert "4 prompts, none continued" in str(report)
    patch.remove()
    assert warned(caplog) == words


@pytest.mark.parametrize("policy", ["h2o", "keyformer"])
def test_with_block_each_log_likelihood_is_what_feeding_by_hand_gives(recall, policy):
    lm = KVPatchLM(**recall, batch_size=8, policy=policy, k=0.25, block=6)
    got = evaluate(lm, ["kvp_recall"], limit=2)
    lm.patch.remove()
    free = evaluate(HFLM(**recall, batch_size=8), ["kvp_recall"], limit=2)
    differs = 0
    for one, plain, (context, answer) in zip(
        answers(got, "kvp_recall"), answers(free, "kvp_recall"), requests(got, "kvp_recall"), strict=True
    ):
        n = len(lm.tok_encode(context))
        ids = lm.tok_encode(context + answer)
        close(one, by_hand(recall["pretrained"], ids, len(ids) - n, policy, int(0.25 * (len(ids) - 1)), 6))
        differs += abs(one - plain) > 0.1
    assert differs > 4


def test_every_setting_is_a_model_argument(recall):
    given = {
        "schedule": "prompt", "bits": 8, "block": 8, "positions": "renumbered", "kv_backend": "torch", "seed": 3,
        "strict": True,
    }  # fmt: skip
    assert {name.removeprefix("kv_") for name in given} == set(OF_PATCH)
    lm = KVPatchLM(**recall, batch_size=2, policy="streaming_llm", k=0.25, sinks=3, **given)
    lm.patch.remove()
    got = lm.patch.settings
    assert (got.policy.schedule, got.block, got.renumbered, got.backend, got.seed) == ("prompt", 8, True, "torch", 3)
    assert got.bits == 8
    assert got.policy.options()["sinks"] == 3 and len(got.strict) == got.n_layers
    for name in OF_PATCH:
        assert re.search(rf"\b(kv_)?{name}\b", KVPatchLM.__doc__), f"{name} is not documented"


def test_a_file_of_settings_is_a_model_argument(recall, tmp_path):
    path = tmp_path / "settings.json"
    kvpatch.Settings("streaming_llm", 0.25, {"sinks": 3, "block": 8}).save(path)
    lm = KVPatchLM(**recall, batch_size=2, settings=str(path), bits=8)
    lm.patch.remove()
    got = lm.patch.settings
    assert (got.policy.name, got.policy.options()["sinks"], got.block, got.bits) == ("streaming_llm", 3, 8, 8)
    assert got.budget.described() == [0.25] * got.n_layers
    for more, words in (
        ({"policy": "h2o"}, f"policy='h2o' and settings={re.escape(str(path))} both name a policy: give one of them"),
        ({"k": 0.5}, "k=0.5 is given beside Settings with k=0.25"),
    ):
        with pytest.raises(kvpatch.KVPatchError, match=words):
            KVPatchLM("no/such/model", settings=path, **more)
    with pytest.raises(kvpatch.KVPatchError, match=r"There is no file none: give one that Settings\.save wrote"):
        KVPatchLM("no/such/model", settings="none")


def test_a_row_is_scored_alike_in_every_batch(recall):
    found = {}
    for size in (1, 8, "auto"):
        lm = KVPatchLM(**recall, batch_size=size, max_batch_size=3, policy="h2o", k=0.25, block=8)
        results = evaluate(lm, ["kvp_recall"], limit=2)
        lm.patch.remove()
        found[size] = answers(results, "kvp_recall")
    lengths = {len(lm.tok_encode(context)) for context, _ in requests(results, "kvp_recall")}
    assert len(lengths) > 1  # so that there was padding
    close(found[8], found[1])
    close(found["auto"], found[1])


def test_the_harness_own_class_scores_alike_where_k_is_in_tokens(recall):
    """Right padding without a mask: a share would count it, and does."""
    found = {}
    for k in (12, 0.25):
        for size in (1, 16):
            lm = HFLM(**recall, batch_size=size)
            with kvpatch.patched(lm.model, "h2o", k, block=8):
                found[k, size] = torch.tensor(answers(evaluate(lm, ["kvp_recall"], limit=2), "kvp_recall"))
    close(found[12, 16].tolist(), found[12, 1].tolist())
    assert (found[0.25, 16] - found[0.25, 1]).abs().max() > 0.05


def test_requests_that_padding_makes_equal_are_told_apart(python):
    """Token 0 is what the harness pads with: a text that ends with it is not the text without it."""
    lm = KVPatchLM(**python, batch_size=4, policy="h2o", k=0.3, block=4)
    text = lm.tok_encode("def attend(call, q, k, v):\n    now = call.now\n    outs, start = [], 0\n")
    asked = [(None, text, [5]), (None, text, [0, 5]), (None, text, [0, 0, 5]), (None, text[:-9], [7])]
    got = [answer for answer, _ in lm._loglikelihood_tokens(asked)]
    lm.patch.remove()
    for one, (_, context, continuation) in zip(got, asked, strict=True):
        ids = context + continuation
        budget = int(0.3 * (len(ids) - 1))
        close(one, by_hand(python["pretrained"], ids, len(continuation), "h2o", budget, 4))


def test_rolling_perplexity_feels_the_budget_in_every_window(python):
    lm = KVPatchLM(**python, batch_size=3, max_length=80, policy="roco", k=0.3, block=8)
    results = evaluate(lm, ["kvp_source"], limit=1)
    lm.patch.remove()
    ((text,),) = requests(results, "kvp_source")
    windows = lm_eval.utils.get_rolling_token_windows(lm.tok_encode(text), lm.prefix_token_id, 80, 1)
    windows = [lm_eval.utils.make_disjoint_window(window) for window in windows]
    assert len(windows) > 3
    want = sum(
        by_hand(python["pretrained"], [*before, *after], len(after), "roco", int(0.3 * (len(before + after) - 1)), 8)
        for before, after in windows
    )
    assert answers(results, "kvp_source")[0] == pytest.approx(want, rel=1e-5)


def test_generate_until_writes_for_each_row_what_it_writes_alone(recall):
    lm = KVPatchLM(**recall, batch_size=8, policy="h2o", k=0.5)
    got = evaluate(lm, ["kvp_answer"], limit=8)
    alone = []
    for prompt, _ in requests(got, "kvp_answer"):
        ids = torch.tensor([lm.tok_encode(prompt)])
        out = lm.model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=lm.tokenizer.pad_token_id)
        alone.append(lm.tok_decode(out[0, ids.shape[1] :]))
    lm.patch.remove()
    assert answers(got, "kvp_answer") == alone
    assert 0 < got["results"]["kvp_answer"]["exact_match,none"] < 1


def test_chat_template_and_few_shots(recall):
    tokenizer = type(recall["tokenizer"]).from_pretrained(recall["pretrained"].name_or_path)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    options = {"apply_chat_template": True, "num_fewshot": 2, "fewshot_as_multiturn": True, "limit": 2}
    plain = HFLM(recall["pretrained"], tokenizer=tokenizer, batch_size=8)
    found = [answers(evaluate(plain, ["kvp_recall"], **options), "kvp_recall")]
    for k in (1.0, 0.2):
        lm = KVPatchLM(recall["pretrained"], tokenizer=tokenizer, batch_size=8, policy="h2o", k=k, block=16)
        found.append(answers(evaluate(lm, ["kvp_recall"], **options), "kvp_recall"))
        lm.patch.remove()
    close(found[1], found[0])
    assert max(abs(a - b) for a, b in zip(found[2], found[0], strict=True)) > 0.1


def test_kept_responses_come_back_and_know_no_budget(recall, tmp_path, monkeypatch):
    monkeypatch.setattr("lm_eval.caching.cache.PATH", str(tmp_path))
    options = {"limit": 2, "use_cache": str(tmp_path / "h2o"), "cache_requests": True}
    lm = KVPatchLM(**recall, batch_size=4, policy="h2o", k=0.2, block=4)
    want = answers(evaluate(lm, ["kvp_recall"], **options), "kvp_recall")
    lm.patch.remove()
    lm = KVPatchLM(**recall, batch_size=4, policy="h2o", k=0.9, block=4)
    monkeypatch.setattr(lm, "_model_call", None)
    assert answers(evaluate(lm, ["kvp_recall"], **options), "kvp_recall") == pytest.approx(want)
    lm.patch.remove()


def test_the_harness_command_knows_the_model(recall, capsys, monkeypatch):
    folder = recall["pretrained"].name_or_path
    arguments = f"pretrained={folder},policy=h2o,recent=0.5,k=0.2,block=6,dtype=float32"
    command = f"lm_eval run --model kvpatch --model_args {arguments} --device cpu --batch_size 4 --limit 4"
    monkeypatch.setattr(sys, "argv", [*command.split(), "--tasks", "kvp_recall", "--include_path", str(LOCAL)])
    monkeypatch.setattr("lm_eval.__main__.setup_logging", lambda *_: None)
    monkeypatch.setattr(TaskManager.__init__, "__defaults__", (None, None, False, None))  # not the harness' thousands
    harness.cli_evaluate()
    printed = capsys.readouterr().out
    lm = KVPatchLM(**recall, batch_size=4, policy="h2o", k=0.2, block=6)
    want = evaluate(lm, ["kvp_recall"], limit=4)["results"]["kvp_recall"]["acc,none"]
    lm.patch.remove()
    line = next(line for line in printed.splitlines() if "kvp_recall" in line and "acc" in line)
    assert f"{want:g}" in line
    assert "kvpatch (" in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"polcy": "h2o"}, r"model_args has no 'polcy'\. Did you mean 'policy'"),
        ({"policy": "snapkv", "windw": 3}, r"model_args has no 'windw'\. Did you mean 'window'"),
        ({"setings": "settings.json"}, r"model_args has no 'setings'\. Did you mean 'settings'"),
        ({"policy": "h2o", "blok": 16}, r"'blok'\. Did you mean 'block'"),
        ({"policy": "h2o", "compression_ratio": 0.5}, r"Did you mean 'k'"),
        ({"policy": "h2o", "window": 3}, r"Policy 'h2o' has no option 'window'"),
    ],
    ids=str,
)
def test_a_misspelt_argument_is_told_before_the_model_is_loaded(arguments, words):
    with pytest.raises(kvpatch.KVPatchError, match=words):
        KVPatchLM("no/such/model", **arguments)


def test_an_argument_that_nobody_takes_is_told(recall):
    folder = recall["pretrained"].name_or_path
    with pytest.raises(kvpatch.KVPatchError, match="model_args has no 'zzz': give arguments of lm_eval's hf model"):
        KVPatchLM(folder, device="cpu", policy="h2o", zzz=3)
    lm = KVPatchLM(folder, device="cpu", policy="h2o", attn_implementation="eager")  # goes to the model, as with hf
    lm.patch.remove()
    assert lm.model.config._attn_implementation == "eager"


def test_the_results_say_of_each_task_if_the_budget_acted(recall, caplog):
    caplog.set_level("INFO")
    for block, word, lines in ((None, "none", 1), (6, "all", 0)):
        caplog.clear()
        lm = KVPatchLM(**recall, batch_size=4, policy="h2o", k=0.2, block=block)
        results = evaluate(lm, ["kvp_recall", "kvp_answer"], limit=2)
        lm.patch.remove()
        said = results["config"]["kvpatch"]
        assert (said["policy"], said["k"], said["block"]) == ("h2o", [0.2], block)
        assert said["tasks"]["kvp_recall"] == {"requests": 8, "acted": word}
        assert said["tasks"]["kvp_answer"] == {"requests": 2, "acted": "all"}
        assert f"[kvpatch] kvp_recall: the budget acted in {word} of its passes (8 requests)" in caplog.text
        assert len(warned(caplog)) == lines


def test_what_is_wrong_is_said_before_anything_runs(recall, monkeypatch, caplog):
    with pytest.raises(kvpatch.KVPatchError, match="Did you mean 'h2o'"):
        KVPatchLM("no/such/model", policy="h2oo")
    with pytest.raises(kvpatch.KVPatchError, match="not a share"):
        KVPatchLM(**recall, policy="h2o", k=1.5)
    with pytest.raises(kvpatch.KVPatchError, match="needs a policy: name the one that suits the use"):
        KVPatchLM("no/such/model", k=0.5)
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    monkeypatch.delitem(sys.modules, "kvpatch.evaluation.lm_eval")
    with pytest.raises(kvpatch.KVPatchError, match=r'pip install "lm-eval>=0.4.13"'):
        importlib.import_module("kvpatch.evaluation.lm_eval")


# ---- the examples ----


def test_harness_example_prints_both_tables_and_the_budget_costs(capsys):
    found = lm_eval_harness.main(["-k", "0.2", "--block", "8", "--limit", "8"])
    before, after = (found[name]["results"] for name in ("unpatched", "patched"))
    assert before["kvp_recall"]["acc,none"] == before["kvp_answer"]["exact_match,none"] == 1
    assert after["kvp_recall"]["acc,none"] < 0.8
    assert after["kvp_answer"]["exact_match,none"] < 0.5
    printed = capsys.readouterr().out
    assert printed.count("|kvp_recall|") == 2 and "llama-0 patched: h2o, k=0.2, block=8" in printed


def test_perplexity_strides_example(caplog):
    found = perplexity_strides.main(["--length", "128", "--stride", "64"])
    unpatched, full, budget = found.values()
    assert torch.equal(unpatched, full)
    assert budget > unpatched + 0.1
    assert not caplog.records


@pytest.mark.parametrize("policy", ["h2o", "keyformer"])
def test_perplexity_by_strides_equals_the_oracle(policy):
    for weights in range(6):
        model, ids = tiny.make("gptj", dtype=torch.float64, seed=weights), tiny.prompt(1, 30, seed=weights)
        total, count, margin = 0.0, 0, 1.0
        for inputs, labels in perplexity_strides.windows(ids, 20, 10):
            want = reference.run(model, inputs[0].tolist(), [], policy=policy, k=0.3, block=4, draw=lambda *a: draw(0, *a))
            scored = labels[0, 1:] != -100
            log = want.logits[:-1].log_softmax(-1).gather(1, inputs[0, 1:, None])[:, 0]
            total, count, margin = total - float(log[scored].sum()), count + int(scored.sum()), min(margin, want.margin)
        if margin > 1e-6:
            break
    assert margin > 1e-6 and count == 29
    with kvpatch.patched(model, policy, 0.3, block=4):
        assert float(perplexity_strides.nats(model, ids, 20, 10)) == pytest.approx(total / count, abs=1e-5)


# ---- what they stand on ----


@pytest.mark.parametrize("masked", [True, False], ids=["mask", "no mask"])
@pytest.mark.parametrize("name", tiny.FIVE)
def test_rows_padded_on_the_right_are_as_they_are_alone(name, masked):
    """In one pass block by block; without a mask, as harnesses pad, where k counts tokens."""
    model, ids, lengths = tiny.make(name, dtype=torch.float64), tiny.prompt(3, 34), (34, 23, 9)
    mask = (torch.arange(34)[None] < torch.tensor(lengths)[:, None]).long()
    given = {"attention_mask": mask} if masked else {}
    for cached in (False, True):
        with torch.no_grad(), kvpatch.patched(model, "keyformer", 0.3 if masked else 6, block=5):
            together = model(ids * mask, use_cache=cached, **given).logits
            alone = [model(ids[row : row + 1, :n], use_cache=cached).logits[0] for row, n in enumerate(lengths)]
        for row, n in enumerate(lengths):
            torch.testing.assert_close(together[row, :n], alone[row], atol=1e-9, rtol=0)


def test_trainer_evaluates_under_the_budget(tmp_path):
    model, lengths = tiny.make("llama_gqa"), (30, 22, 17, 30)
    rows = [tiny.prompt(1, n, seed=n + i)[0] for i, n in enumerate(lengths)]

    def collate(batch):
        padded = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=0)
        mask = (padded > 0).long()
        return {"input_ids": padded, "attention_mask": mask, "labels": padded.masked_fill(mask == 0, -100)}

    arguments = TrainingArguments(
        str(tmp_path), per_device_eval_batch_size=2, use_cpu=True, report_to=[], disable_tqdm=True, prediction_loss_only=True
    )
    trainer = Trainer(model, arguments, eval_dataset=rows, data_collator=collate)

    def loss(**patching):
        if not patching:
            return trainer.evaluate()["eval_loss"]
        with kvpatch.patched(model, "h2o", **patching):
            return trainer.evaluate()["eval_loss"]

    free = loss()
    assert loss(k=1.0) == pytest.approx(free, abs=1e-5)
    assert loss(k=0.3) == pytest.approx(free, abs=1e-5)
    total = 0.0
    for pair in (rows[:2], rows[2:]):  # a batch's loss is the mean over its tokens, the result the mean over batches
        sums = [-by_hand_nats(model, row.tolist()) for row in pair]
        total += sum(sums) / sum(len(row) - 1 for row in pair) / 2
    assert loss(k=0.3, block=4) == pytest.approx(total, abs=1e-4)
    assert abs(total - free) > 1e-2


def by_hand_nats(model, ids):
    """As by_hand, of all tokens but the first; the last one is read too, and counts."""
    with torch.no_grad(), kvpatch.patched(model, "h2o", int(0.3 * len(ids))) as patch:
        cache = patch.new_cache()
        logits = [model(part, past_key_values=cache).logits[0] for part in torch.tensor([ids]).split(4, 1)]
    return float(torch.cat(logits)[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None]).sum())


def test_report_says_that_the_budget_acted_on_no_token():
    model, ids = tiny.make("llama_gqa"), tiny.prompt(1, 24)
    words = "no token: all were computed before the first eviction"

    def report(tokens=ids, **patching):
        with torch.no_grad(), kvpatch.patched(model, "h2o", **patching) as patch:
            cache = patch.new_cache()
            model(tokens, past_key_values=cache)
            return patch.report()

    assert words in str(report(k=0.5)) and not report(k=0.5).to_dict()["acted"]
    assert words in str(report(k=0.5, block=24))
    assert words not in str(report(k=0.5, block=23)) and report(k=0.5, block=23).acted
    assert words not in str(report(k=1.0))
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        model.generate(ids, max_new_tokens=3)
    assert patch.report().acted
