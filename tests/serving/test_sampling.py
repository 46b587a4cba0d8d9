"""Sampling of each request by its own settings in continuous batching."""

import pytest
import torch
from transformers import GenerationConfig

import kvpatch
from kvpatch.serving.sampling import RequestSampling, make_sampling, sample_by_request
from tests.helpers.marks import batches
from tests.helpers.serving import alone, collect, engine, greedy, prompts
from tests.helpers.tiny import VOCAB, make

pytestmark = batches


@pytest.fixture(scope="module")
def model():
    return make("llama_gqa")


def draw(model, logits_1V, count=4000, **given):
    """The share of each token among draws after one prompt."""
    sampling = make_sampling(model, GenerationConfig(do_sample=True, **given), 1, seed=0)
    ids_1T = torch.tensor([[5]])
    tokens = torch.tensor([int(sampling.choose(ids_1T, logits_1V).argmax()) for _ in range(count)])
    return torch.bincount(tokens, minlength=logits_1V.shape[1]) / count


def test_draws_follow_the_softmax(model):
    logits_1V = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    for temperature in (0.5, 1.0, 1.7):
        wanted_V = (logits_1V[0] / temperature).softmax(-1)
        assert torch.allclose(draw(model, logits_1V, temperature=temperature), wanted_V, atol=0.03), temperature
    assert draw(model, logits_1V, top_k=2)[2:].sum() == 0
    assert draw(model, logits_1V, top_p=0.5)[1:].sum() == 0


def test_penalties_are_of_tokens_that_were_generated(model):
    """By OpenAI's formula: the prompt does not count, each further time counts for frequency alone."""
    sampling = make_sampling(model, GenerationConfig(do_sample=False), 2, presence=0.5, frequency=0.25)
    logits_1V = sampling.choose(torch.tensor([[0, 1, 1, 2, 2]]), torch.zeros(1, 4))
    assert logits_1V.tolist() == [[0.0, -0.75, -1.0, 0.0]]


def run(model, given):
    """The tokens of requests, each with the keyword arguments of make_sampling or None, in one engine."""
    texts = prompts((20, 33, 9))
    manager = model.init_continuous_batching(generation_config=greedy(8), continuous_batching_config=engine())
    sample_by_request(manager)
    manager.start()
    try:
        names = []
        for ids, (config, seed) in zip(texts, given, strict=True):
            sampling = make_sampling(model, config, len(ids), seed=seed)
            names.append(manager.add_request(ids, sampling=sampling))
        found = collect(manager, names)
    finally:
        manager.stop(block=True, timeout=30)
    assert all(found[name].error is None for name in names)
    return [found[name].generated_tokens for name in names]


def test_each_request_by_its_own_settings(model):
    """A greedy request beside those that sample has generate()'s tokens, and a seed is a request's own."""
    argmax, hot = GenerationConfig(do_sample=False), GenerationConfig(do_sample=True, temperature=2.0)
    with kvpatch.patched(model, "h2o", 12):
        first = run(model, [(argmax, None), (hot, 1), (hot, 2)])
        again = run(model, [(hot, 3), (hot, 1), (argmax, None)])
        wanted = [alone(model, ids, 8) for ids in prompts((20, 33, 9))]
    assert first[0] == wanted[0] and again[2] == wanted[2]
    assert first[1] == again[1] != wanted[1], "whatever comes beside it"
    assert first[2] != wanted[2] and first[0] != again[0]


def test_generate_with_the_same_processors(model):
    """A greedy request under a penalty of transformers has the tokens of generate() under it."""
    ids = prompts((20,))[0]
    config = GenerationConfig(do_sample=False, repetition_penalty=1.8, sequence_bias={(7,): 3.0})
    with kvpatch.patched(model, "h2o", 12):
        found = run(model, [(config, None), (GenerationConfig(do_sample=False), None), (config, None)])[0]
        wanted = model.generate(
            torch.tensor([ids]), max_new_tokens=8, do_sample=False, repetition_penalty=1.8, sequence_bias={(7,): 3.0},
            eos_token_id=None, pad_token_id=0,
        )[0, 20:]  # fmt: skip
    assert found == wanted.tolist() != alone(model, ids, 8)


@pytest.mark.parametrize("given", [{"min_new_tokens": 6}, {"min_length": 26}, {"bad_words_ids": [[74]]}], ids=str)
def test_a_server_s_model_that_forbids_tokens(given, model, monkeypatch):
    """By its generation config, such as an end before some tokens; requests have the tokens of generate()."""
    pytest.importorskip("openai")
    from kvpatch.cli.answering import start_engine

    ids = prompts((20,))[0]
    with kvpatch.patched(model, "h2o", 12):
        end = alone(model, ids, 8)[1]
        monkeypatch.setattr(model, "generation_config", GenerationConfig(eos_token_id=end, pad_token_id=0, **given))
        wanted = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, 20:].tolist()
        manager = start_engine(model, {"num_blocks": 40})
        try:
            sampling = make_sampling(model, model.generation_config, len(ids))
            name = manager.add_request(ids, max_new_tokens=8, eos_token_id=end, sampling=sampling)
            found = collect(manager, [name])[name]
        finally:
            manager.stop(block=True, timeout=30)
    assert found.error is None and found.generated_tokens == wanted != [wanted[0], end]


def test_rows_without_sampling_are_left_alone():
    scores = torch.randn(2, VOCAB)
    assert RequestSampling()(scores, torch.zeros(2)) is scores
