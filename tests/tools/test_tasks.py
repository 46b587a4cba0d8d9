"""The synthetic tasks say what they promise, and every committed model loads and has learned them."""

import itertools
import json
import random

import pytest
import torch

from tests.helpers.marks import slow_but
from tools.training import cards as train_cards
from tools.training import tasks, train

CARDS = {name: json.loads((folder / "card.json").read_text()) for name, folder in tasks.shipped().items()}
NAMES = sorted(CARDS)
WALKERS = [name for name in NAMES if train.RECIPES[train.SHIPPED[name][0]].walks]
SYNTHETIC = [name for name in NAMES if "accuracy" in CARDS[name] and name not in WALKERS]


def words(row) -> list[str]:
    return [tasks.WORDS[token] for token in row.tolist()]


def groups(row: list[str], start: str, size: int) -> list[tuple[str, ...]]:
    """The `size` words after every `start`-word (its first letter decides)."""
    return [tuple(row[i : i + size + 1]) for i, word in enumerate(row) if word.startswith(start)]


@pytest.mark.parametrize("task", [tasks.recall, tasks.needle])
@pytest.mark.parametrize("in_prompt", [True, False])
def test_an_answer_is_what_the_context_says_of_its_key(task, in_prompt):
    batch = task(random.Random(0), 8, questions=3, in_prompt=in_prompt)
    assert batch.answer_BAW.shape == (8, 3, 3)
    for tokens, answers in zip(batch.tokens_BT, batch.answer_BAW, strict=True):
        row = words(tokens)
        context, tail = row[: row.index("<q>")], row[row.index("<q>") :]
        records = {record[0]: record[1:] for record in groups(context, "k", 3)}
        asked = [record[0] for record in groups(tail, "k", 3)]
        assert len(set(asked)) == 3
        assert [tuple(words(answer)) for answer in answers] == [records[key] for key in asked]
        firsts = [value for record in records.values() for value in record[:2]]
        assert len(set(firsts)) == len(firsts), "a first or second value belongs to one key only"
        assert not set(firsts) & {record[2] for record in records.values()}


def test_where_the_question_stands():
    rng = random.Random(0)
    batch = tasks.needle(rng, 2, context=100)
    assert words(batch.prompt_BT[0])[100] == "<q>"
    assert batch.prompt_length == 102
    batch = tasks.needle(rng, 2, context=100, in_prompt=False)
    assert words(batch.continuation_BT[0])[0] == "<q>"
    assert batch.prompt_length == 100
    assert torch.equal(torch.cat([batch.prompt_BT, batch.continuation_BT], 1), batch.tokens_BT)


def test_needles_are_written_once_and_fill_the_context():
    batch = tasks.needle(random.Random(0), 16, context=120, needles=6)
    for tokens in batch.tokens_BT:
        mentioned = [record[0] for record in groups(words(tokens)[:120], "k", 3)]
        assert len(mentioned) == len(set(mentioned)) == 6


def test_copy_repeats_distinct_tokens():
    batch = tasks.copy(random.Random(0), 4, length=20)
    assert batch.answer_BAW.shape == (4, 20, 1)
    assert torch.equal(batch.answer_BAW[:, :, 0], batch.tokens_BT[:, 1:21])
    assert all(len(set(row.tolist())) == 20 for row in batch.continuation_BT)


def test_summary_answers_are_the_marked_values():
    batch = tasks.summary(random.Random(0), 8, marks=5)
    for tokens, answers in zip(batch.tokens_BT, batch.answer_BAW, strict=True):
        context = words(tokens)[: batch.prompt_length]
        assert groups(context, "m", 1) == [(f"m{i + 1}", words(answer)[0]) for i, answer in enumerate(answers)]


@pytest.mark.parametrize("length", [16, 64, 256])
def test_training_weighs_what_can_be_looked_up(length):
    tokens_BT, weights_BT = tasks.training_batch(random.Random(0), length, 16 * length)
    assert tokens_BT.shape == weights_BT.shape == (16, length)
    for tokens, weights in zip(tokens_BT, weights_BT, strict=True):
        row, hard = words(tokens), (weights == tasks.HARD).tolist()
        assert any(hard)
        for i, word in enumerate(row):
            assert not hard[i] or word in row[:i], "a looked-up token has been seen"
            if word.startswith("k") and i + 3 < length and "<rec>" not in row:
                assert hard[i + 1 : i + 4] == [word in row[:i]] * 3, "mentions weigh from the second on"


def test_filler_is_the_chain_that_the_models_learned():
    """The chain is part of the committed weights: it must be the same on every machine and Python."""
    after = {"w00": "w23 w30 w18 w26", "w01": "w26 w19 w23 w18"}
    row = words(tasks.needle(random.Random(0), 1, context=2000).tokens_BT[0])
    pairs = list(itertools.pairwise(row))
    for word, successors in after.items():
        assert {b for a, b in pairs if a == word and b.startswith("w")} == set(successors.split())
    assert max(len({b for a, b in pairs if a == word and b.startswith("w")}) for word in tasks.WORDS) == 4


def test_same_seed_same_rows():
    for task in tasks.TASKS.values():
        first, again, other = (task(random.Random(seed), 3).tokens_BT for seed in (5, 5, 6))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


def test_correct_needs_every_token_of_an_answer():
    batch = tasks.recall(random.Random(0), 2, questions=2)
    predicted = batch.continuation_BT.clone()
    assert batch.correct(predicted).all()
    predicted[0, 4] = tasks.EOS
    predicted[1, 5] = tasks.EOS
    assert batch.correct(predicted).tolist() == [[False, True], [True, True]]


def test_what_does_not_fit_is_refused_in_words():
    with pytest.raises(ValueError, match=r"length=20: 6 records and 0 marks need 25"):
        tasks.needle(random.Random(0), 1, context=20, needles=6)
    with pytest.raises(ValueError, match=r"questions=9: only 4 different keys"):
        tasks.recall(random.Random(0), 1, keys=4, questions=9)
    with pytest.raises(ValueError, match=r"questions=16: 16 mentions hardly ever"):
        tasks.recall(random.Random(0), 1, questions=16)
    with pytest.raises(ValueError, match=r"32 keys: 1 to 31"):
        tasks.needle(random.Random(0), 1, needles=32)
    with pytest.raises(ValueError, match=r"marks=9: there are 8"):
        tasks.summary(random.Random(0), 1, marks=9)
    with pytest.raises(ValueError, match=r"name='nobody'.*llama-0"):
        tasks.load("nobody")


def test_tokenizer_words_and_any_text():
    tokenizer = tasks.tokenizer()
    assert len(tokenizer) == 400
    assert tokenizer("k07 v12 v31 v05").input_ids == [tasks.KEYS[7], *(tasks.VALUES[i] for i in (12, 31, 5))]
    assert tokenizer(" ".join(tasks.WORDS)).input_ids == list(range(144))
    assert tokenizer.decode(range(144)) == " ".join(tasks.WORDS)
    for text in ("", " héllo,\n\tworld 🎉 日本 ", "unmarked1 k077 task07", "size m1 chip k01"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_every_shipped_model_has_its_card_and_no_other():
    assert set(NAMES) == set(train.SHIPPED)
    for name, (recipe, seed) in train.SHIPPED.items():
        card = CARDS[name]
        assert card["name"] == name
        assert card["seed"] == seed
        assert card["architecture"] == train.RECIPES[recipe].architecture
        options = " --device cuda" if "device" in card else ""
        assert card["command"].startswith(f"python -m tools.training {recipe} --seed {seed}{options} ")
        assert card["command"].endswith(" --out tools/models")
        assert (tasks.shipped()[name] / "README.md").read_text() == train.describe(card)
        shares = {task: share for task, share in card.get("accuracy", {}).items() if task != "traces"}
        assert min(shares.values(), default=1.0) >= train_cards.USABLE


def test_the_demos_prompts_are_rows_of_the_needle_task():
    assert tasks.DEMO.read_text() == tasks.demo_prompts(), "tasks.DEMO.write_text(tasks.demo_prompts())"


@pytest.mark.parametrize("recipe", slow_but(list(train.RECIPES)[:1], train.RECIPES))
def test_one_step_moves_every_parameter_and_muon_has_the_hidden_matrices(recipe):
    model = train.build(train.RECIPES[recipe], seed=0)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimizer = train.Optimizer(model, 3e-3)
    loss, _ = train.weighted_loss(model, *tasks.training_batch(random.Random(0), 16, 64))
    optimizer.step(loss)
    assert all((before[name] != parameter).any() for name, parameter in model.named_parameters())
    muon, adam = ({id(p) for group in part.param_groups for p in group["params"]} for part in optimizer.parts)
    layers = model.config.num_hidden_layers
    assert len(muon) == layers * {"llama": 7, "mistral": 7, "mpt": 4, "gptj": 6, "gpt2": 4}[model.config.model_type]
    assert len(muon) + len(adam) == len(before)


@pytest.mark.parametrize("name", NAMES)
def test_a_committed_model_loads_and_its_tokenizer_round_trips(name):
    model, tokenizer = tasks.load(name)
    card = CARDS[name]
    assert model.num_parameters() == card["parameters"]
    assert model.config.use_cache
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    text = "def f(x):\n    return 'é日🎉'\n"
    ids = tokenizer(text, return_tensors="pt")
    assert tokenizer.decode(ids.input_ids[0]) == text
    assert ids.input_ids.max() < model.get_input_embeddings().num_embeddings
    assert model(**ids).logits.isfinite().all()


@pytest.mark.parametrize("name", SYNTHETIC)
def test_a_committed_model_answers(name):
    model, _ = tasks.load(name)
    assert tasks.exact_match(model, tasks.needle(random.Random(0), 16)).float().mean() >= 0.9
    assert tasks.exact_match(model, tasks.recall(random.Random(0), 4)).float().mean() >= 0.9
