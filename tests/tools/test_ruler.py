"""RULER's families in miniature say what they promise, and their rows fit every length."""

import random

import pytest
import torch

from tools.training import ruler, tasks, train

WORDS = tasks.tokenizer()


def words(row) -> list[str]:
    return WORDS.decode(row.tolist()).split(" ")


def facts(context: list[str]) -> list[list[str]]:
    """What stands between fillers."""
    found, own = [], []
    for word in [*context[1:], "w00"]:
        if word.startswith("w"):
            found += [own] if own else []
            own = []
        else:
            own.append(word)
    return found


@pytest.mark.parametrize("in_prompt", [True, False])
@pytest.mark.parametrize("family", ruler.FAMILIES)
def test_an_answer_is_what_the_context_says(family, in_prompt):
    batch = ruler.FAMILIES[family](random.Random(0), 8, context=200, in_prompt=in_prompt)
    assert batch.prompt_length == 200 + 2 * in_prompt
    for tokens, answers in zip(batch.tokens_BT, batch.answer_BAW, strict=True):
        known = facts(words(tokens[:200]))
        next_of = {fact[0]: fact[1:] for fact in known}
        for column, answer in zip(batch.answers_AW[:, 0].tolist(), answers, strict=True):
            question, asked = words(tokens[column - 2 : column])
            assert question == "<q>"
            if family == "counting":
                assert tasks.BOS not in answer and WORDS.decode(answer.tolist()).strip() == str(known.count([asked]))
                continue
            way = []
            while asked in next_of:
                way += next_of[asked]
                asked = way[-1]
            assert words(answer) == way


def test_variables_are_set_before_they_are_read():
    for tokens in ruler.tracking(random.Random(0), 8, context=200).tokens_BT:
        held: set[str] = set()
        for source, target in facts(words(tokens[:200])):
            assert source.startswith("v") or source in held
            held.add(target)


@pytest.mark.parametrize("length", [16, 24, 48, 96, 256])
def test_rows_fit_every_length_of_the_curriculum_and_weigh_what_can_be_looked_up(length):
    for seed in range(20):
        tokens_BT, weights_BT = ruler.training_batch(random.Random(seed), length, 8 * length, share=1.0)
        assert tokens_BT.shape == weights_BT.shape == (8, length)
        assert (weights_BT >= tasks.HARD).any(1).all()
        assert (weights_BT[tokens_BT == tasks.PAD] == 0).all()


def test_a_share_of_the_rows_is_theirs():
    tokens_BT, _ = ruler.training_batch(random.Random(0), 16, 16 * 400, share=0.5)
    digits = ((tokens_BT >= ruler.DIGITS.start) & (tokens_BT < ruler.DIGITS.stop)).any(1).float().mean().item()
    assert digits == pytest.approx(0.5 / 3, abs=0.06)
    plain, _ = ruler.training_batch(random.Random(0), 16, 160, share=0.0)
    assert torch.equal(plain[0], ruler.training_batch(random.Random(0), 16, 160, share=0.0)[0][0])


def test_what_does_not_fit_is_refused_in_words():
    with pytest.raises(ValueError, match=r"length=20: .* need 45"):
        ruler.hops(random.Random(0), 1, context=20, chains=4)
    with pytest.raises(ValueError, match=r"9 chains of 4 keys: there are 32 keys"):
        ruler.tracking(random.Random(0), 1, context=900, chains=9)


def test_longer_recipes_have_them():
    tokens_BT, _ = train.RECIPES["llama-1k"].make(random.Random(0), 64, 64 * 64)
    assert ((tokens_BT >= ruler.DIGITS.start) & (tokens_BT < ruler.DIGITS.stop)).any()


def test_a_count_weighs_more_than_other_tokens_and_no_curriculum_waits_for_it():
    for seed in range(8):
        row = ruler._counting_row(random.Random(seed), 60, 3, 4, 3)
        weights = [weight for token, weight in zip(row.tokens, row.weights, strict=True) if token in ruler.DIGITS]
        assert weights == [ruler.COUNTED] * 3
    assert ruler.COUNTED > tasks.HARD
