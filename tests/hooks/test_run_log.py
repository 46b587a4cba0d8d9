"""Passes in which the budget acts are told from those in which it cannot: by one warning of each kind, and by the report."""

import gc

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaModel, Trainer, TrainingArguments

import kvpatch
from tests.helpers.tiny import IDS, VOCAB, make, prompt

N = 24


def said(caplog):
    """Warnings of kvpatch so far."""
    return [record.message for record in caplog.records if record.name.startswith("kvpatch")]


def train(model, ids):
    model(ids, labels=ids).loss.backward()


def evaluate(model, ids):
    with torch.no_grad():
        return model(ids).logits


def no_cache(model, ids):
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def generate_without(model, ids):
    return model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0, use_cache=False)


def one_token(model, ids):
    return model.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)


def generate(model, ids):
    return model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)


KINDS = {
    "training": (train, "this training pass", "training", 1),
    "cache dropped": (evaluate, "this pass, from whose cache nothing went on", "prompt", 1),
    "use_cache=False": (no_cache, "this forward without a cache", "no_cache", 1),
    "generate(use_cache=False)": (generate_without, "leave use_cache=False out of generate()", "no_cache", 3),
    "one token": (one_token, "this generate(), which ended with its first token", "prompt", 1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_that_cannot_evict_is_told_at_once_and_once(kind, caplog):
    run, words, counted, passes = KINDS[kind]
    model, ids = make("llama_gqa").train(kind == "training"), prompt(1, N)
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        run(model, ids)
        (first,) = said(caplog)
        assert first.startswith("[kvpatch] policy 'h2o', k=0.5 does not act in ") and words in first
        advice = f"Give block=, below the {N} tokens of the pass, such as block={N // 4}"
        assert (advice if kind != "one token" else "ask for more tokens") in first
        run(model, ids)
        run(model, ids)
        assert patch.report().passes == {counted: (3 * passes, 0)}
    assert said(caplog) == [first], "once, and not at the block's end"


def test_a_learner_of_rollouts_is_told_of_their_replay(caplog):
    model, ids = make("llama_gqa").train(), prompt(1, N)
    for recording in (False, True):
        with kvpatch.patched(model, "h2o", 0.5, record=recording):
            train(model, ids)
    plain, recorded = said(caplog)
    words = "; or read what a rollout wrote in a replay: with patch.replay(patch.record())"
    assert words in recorded and words not in plain


@pytest.mark.parametrize("kind", KINDS)
def test_with_block_nothing_is_told_and_the_report_counts(kind, caplog):
    run, _, counted, passes = KINDS[kind]
    model, ids = make("llama_gqa").train(kind == "training"), prompt(1, N)
    with kvpatch.patched(model, "h2o", 0.5, block=8) as patch:
        run(model, ids)
        run(model, ids)
        assert patch.report().passes == {counted: (2 * passes, 2 * passes)}
    assert not said(caplog) and patch.report().acted
    assert "the budget acted in all" in str(patch.report())


def test_one_pass_that_felt_it_does_not_mute_the_others(caplog):
    model, ids = make("llama_gqa"), prompt(1, N)
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        generate(model, ids)
        assert not said(caplog)
        for _ in range(20):
            evaluate(model, ids)
        model.train()
        train(model, ids)
        report = patch.report()
    assert len(said(caplog)) == 2
    assert report.passes == {"prompt": (21, 0), "decode": (3, 3), "training": (1, 0)} and report.dropped == 20
    assert "training: 1 pass, the budget acted in none (block= would make it act)" in str(report)
    assert "21 prompts, 20 not continued" in str(report) and "3 decode steps, the budget acted in all" in str(report)


def test_a_patch_that_is_never_removed_tells_too(caplog):
    model, ids = make("llama_gqa"), prompt(1, N)
    kvpatch.patch(model, "h2o", 0.5)
    evaluate(model, ids)
    assert len(said(caplog)) == 1


def test_what_goes_on_is_not_told(caplog):
    """From the cache itself, a clone, a part of its rows, a file, or what two of them were joined to."""
    model, ids = make("llama_gqa"), prompt(2, N)
    more = ids[:, :1]
    with torch.no_grad(), kvpatch.patched(model, "h2o", 0.5) as patch:
        past = model(ids).past_key_values
        model(more, past_key_values=past)
        clone = model(ids).past_key_values.clone()
        model(more, past_key_values=clone)
        past = model(ids).past_key_values
        past.batch_select_indices(torch.tensor([0]))
        model(more[:1], past_key_values=past)
        joined = kvpatch.EvictingCache.concatenate([model(ids).past_key_values, past])
        model(prompt(3, 1), past_key_values=joined)
        cache = patch.new_cache()
        model(ids, past_key_values=cache)  # one's own cache may be kept for later
        del past, clone, joined, cache
    gc.collect()
    assert not said(caplog)


def test_a_held_output_is_told_when_the_block_ends(caplog):
    model, ids = make("llama_gqa"), prompt(1, N)
    with kvpatch.patched(model, "h2o", 0.5):
        out = model(ids)
        assert not said(caplog)
    assert len(said(caplog)) == 1 and "nothing went on" in said(caplog)[0]
    del out
    assert len(said(caplog)) == 1


def test_a_text_below_the_budget_is_counted_and_not_told(caplog):
    """No argument would change it: there is nothing to evict yet."""
    model, ids = make("llama_gqa"), prompt(1, N)
    with kvpatch.patched(model, "h2o", N) as patch:
        evaluate(model, ids)
        no_cache(model, ids)
        generate(model, ids)
        model.train()
        train(model, ids)
        # the first decoded token is computed over all others; the pass of the second evicted one before
        assert patch.report().passes == {"prompt": (2, 0), "no_cache": (1, 0), "decode": (3, 2), "training": (1, 0)}
    with kvpatch.patched(make("llama_gqa"), "full"):
        evaluate(model, ids)
    assert not said(caplog)


@pytest.mark.parametrize(("policy", "options", "steps"), [
    ("snapkv", {"k": 0.5}, (3, 3)), ("snapkv", {"k": N}, (3, 0)), ("h2o", {"k": N + 1}, (3, 1)), ("h2o", {"k": 1.0}, (3, 0)),
    ("h2o", {"k": 2, "schedule": "decode"}, (3, 0)), ("h2o", {"k": 1, "schedule": "decode"}, (3, 1)),
])  # fmt: skip
def test_decode_steps_count_once_something_was_evicted(policy, options, steps):
    model, ids = make("llama_gqa"), prompt(1, N)
    with kvpatch.patched(model, policy, **options) as patch:
        generate(model, ids)
        held, seen = patch.report().held(), patch.report().seen
        assert patch.report().passes["decode"] == steps
    assert bool((held < seen).any()) or not steps[1]


def test_a_block_as_long_as_the_pass_is_told(caplog):
    model, ids = make("llama_gqa").train(), prompt(1, N)
    with kvpatch.patched(model, "h2o", 0.5, block=N):
        train(model, ids)
    assert f"Give a smaller block= than {N}, below the {N} tokens of the pass" in said(caplog)[0]


def test_the_schedule_is_named_where_block_cannot_help(caplog):
    model, ids = make("llama_gqa").train(), prompt(1, N)
    with kvpatch.patched(model, "h2o", 0.5, schedule="decode"):
        train(model, ids)
    assert "give schedule='both' and block=" in said(caplog)[0]


def test_the_report_outlives_the_cache():
    """A forward whose output is gone, a loop whose cache is gone, and training, whose caches end with each layer."""
    model, ids = make("llama_gqa"), prompt(1, N)
    with torch.no_grad(), kvpatch.patched(model, "h2o", 0.5) as patch:
        model(ids)
        assert patch.report().held().tolist() == [[[12, 12]]] * 2 and patch.report().seen == N
        past = model(ids).past_key_values
        for token in range(3):
            model(torch.tensor([[token]]), past_key_values=past)
        want = [past.positions(layer) for layer in range(2)]
        del past
        report = patch.report()
        assert report.seen == N + 3 and report.lengths == (N + 3,)
        assert all(map(torch.equal, report.positions, want))
    assert patch.report().seen == N + 3, "after the block too"
    with kvpatch.patched(model.train(), "h2o", 0.5, block=8) as patch:
        train(model, ids)
        report = patch.report()
        assert report.held().tolist() == [[[12, 12]]] * 2 and report.seen == N and report.acted
        assert report.full_nbytes == 2 * 2 * 2 * 8 * 4 * N


def test_a_report_keeps_no_keys_and_values_alive():
    model, ids = make("llama_gqa"), prompt(1, N)
    with torch.no_grad(), kvpatch.patched(model, "h2o", 0.5) as patch:
        past = model(ids).past_key_values
        layers = [layer.kv for layer in past.layers]
        del past
        assert patch.report().seen == N
        for slots in layers:
            assert not [one for one in gc.get_referrers(slots) if one is not layers and isinstance(one, dict)]


def test_steps_inside_a_graph_are_counted():
    from transformers import CompileConfig

    model, ids = make("llama_gqa"), prompt(1, N)
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        model.generate(ids, **options, compile_config=CompileConfig(backend="eager"))
        assert patch.report().passes == {"prompt": (1, 0), "decode": (4, 4)}


@pytest.mark.parametrize("block", [None, 8])
def test_models_of_all_kinds_are_told(block, caplog):
    """Without a head, wrapped by PEFT, with gradient checkpointing, and evaluated by the Trainer."""
    ids = prompt(1, N)
    acted = 0 if block is None else 1
    base = LlamaModel(LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, **IDS
    )).eval()  # fmt: skip
    with torch.no_grad(), kvpatch.patched(base, "h2o", 0.5, block=block) as patch:
        base(ids)
        assert patch.report().passes == {"prompt": (1, acted)}
    wrapped = get_peft_model(make("llama_gqa"), LoraConfig(target_modules=["q_proj"])).train()
    with kvpatch.patched(wrapped, "h2o", 0.5, block=block) as patch:
        wrapped(input_ids=ids, labels=ids).loss.backward()
        assert patch.report().passes == {"training": (1, acted)}
    checkpointing = make("llama_gqa").train()
    checkpointing.gradient_checkpointing_enable({"use_reentrant": False})
    with kvpatch.patched(checkpointing, "h2o", 0.5, block=block) as patch:
        train(checkpointing, ids)
        assert patch.report().passes == {"training": (1, acted)}
    assert len(said(caplog)) == (0 if block else 3)


@pytest.mark.parametrize("block", [None, 8])
def test_a_trainer_shows_in_the_report(block, tmp_path, caplog):
    model, data = make("llama_gqa"), [{"input_ids": row, "labels": row} for row in prompt(4, N)]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, per_device_eval_batch_size=2, save_strategy="no",
        report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    with kvpatch.patched(model, "h2o", 0.5, block=block) as patch:
        trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data)
        trainer.train()
        assert len(said(caplog)) == (0 if block else 1)
        trainer.evaluate()
        report = patch.report()
    acted = 2 if block else 0
    assert report.passes == {"training": (2, acted), "no_cache": (2, acted)}
    assert f"training: 2 passes, the budget acted in {'all' if block else 'none'}" in str(report)
    assert len(said(caplog)) == (0 if block else 2)


def test_an_assistants_cache_is_not_reported_on():
    """A draft of one token at a time uses its cache last; the report is on the cache of the call."""
    model, ids = make("llama_gqa"), prompt(1, N)
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        model.generate(ids, **options, assistant_early_exit=1)
        assert patch.report().held().tolist() == [[[12, 12]]] * 2


@pytest.mark.parametrize("stopped", [False, True])
def test_a_generate_that_ends_with_its_first_token_says_so(caplog, stopped):
    """In place of advice about block=, which a generate() has no use for."""
    model, text = make("llama_gqa"), prompt(1, 20)
    with kvpatch.patched(model, "h2o", k=0.5), caplog.at_level("WARNING", "kvpatch"):
        first = int(model.generate(text, max_new_tokens=1, do_sample=False, pad_token_id=0)[0, -1])
        caplog.clear()
    with kvpatch.patched(model, "h2o", k=0.5), caplog.at_level("WARNING", "kvpatch"):
        more = {"max_new_tokens": 5, "eos_token_id": first} if stopped else {"max_new_tokens": 1}
        out = model.generate(text, do_sample=False, pad_token_id=0, **more)
        assert out.shape == (1, 21)
    (words,) = said(caplog)
    assert "does not act in this generate(), which ended with its first token" in words and "ask for more tokens" in words
    assert "block" not in words
