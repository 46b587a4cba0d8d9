"""Requests of continuous batching whose prompts begin with a prefix of the patch start from it."""

import copy

import pytest
import torch

import kvpatch
from tests.helpers.serving import batched, collect, prompts, running
from tests.helpers.tiny import make

LONG, SHORT = prompts((70, 30), seed=2)
TEXTS = [LONG + rest for rest in prompts((11, 40, 1), seed=4)] + prompts((61,)) + [[*SHORT, 7, 8], LONG]


def begun(model, ids, prefix, new=12):
    given = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(torch.tensor([ids]), past_key_values=prefix, **given)[0, len(ids) :].tolist()


def expected(model, patch, texts=TEXTS):
    return [begun(model, ids, patch.prefixes.longest(ids)) for ids in texts]


@pytest.mark.parametrize(
    ("policy", "k", "options"),
    [
        ("h2o", 24, {}),
        ("keyformer", 0.4, {}),
        ("snapkv", 24, {"turns": "first", "window": 8}),
        ("snapkv", 24, {"turns": "each", "window": 8}),
        ("adakv", 0.4, {}),
        ("h2o", 24, {"block": 16}),
        ("h2o", 24, {"schedule": "decode"}),
    ],
    ids=str,
)
def test_tokens(policy, k, options):
    """The tokens of generate() from the prefix, which are not those without; each prompt reads only what follows it."""
    model = make("llama_gqa")
    with kvpatch.patched(model, policy, k, **options) as patch:
        plain = batched(model, TEXTS)
        for ids in (LONG, SHORT, LONG[:20]):
            patch.prefix(ids)
        wanted = expected(model, patch)
        assert batched(model, TEXTS) == wanted
        assert policy == "adakv" or options or wanted != plain
        assert [one.copies for one in patch.prefixes] == [6, 2, 2], "the longest that the prompt goes beyond"


@pytest.mark.parametrize("alike", [True, False])
def test_a_copy_with_other_weights_reads_its_texts_itself(alike):
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 24) as patch:
        twin = copy.deepcopy(model)
        if not alike:
            with torch.no_grad():
                for parameter in twin.parameters():
                    parameter.mul_(0.9)
        plain = batched(twin, TEXTS[:1])
        prefix = patch.prefix(LONG)
        assert batched(twin, TEXTS[:1]) == (expected(model, patch, TEXTS[:1]) if alike else plain)
        assert prefix.copies == 2 * alike


def test_several_sequences_and_chunks():
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 24) as patch:
        patch.prefix(LONG)
        wanted = expected(model, patch, TEXTS[:3])
        assert batched(model, TEXTS[:3], sequences=2) == [tokens for tokens in wanted for _ in range(2)]
        assert batched(model, TEXTS[2:3], sequences=2) == [wanted[2]] * 2, "of which one token alone is left to read"
        chunked = batched(model, TEXTS[:2], max_batch_tokens=16)
        assert chunked[0] == wanted[0], "what follows the prefix fits a pass"
        cache, ids = patch.prefix(LONG).copy(), torch.tensor([TEXTS[1]])
        with torch.no_grad():
            for first in (70, 86):
                model(ids[:, first : first + 16], past_key_values=cache)
        assert chunked[1] == begun(model, TEXTS[1], cache), "40 tokens behind it are read in three passes"


def test_requests_that_come_and_are_cancelled():
    """They wait without memory of their own, and leave the prefix as it was."""
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 16) as patch:
        prefix = patch.prefix(LONG)
        before = [prefix.positions(layer) for layer in range(2)]
        wanted = expected(model, patch, TEXTS[:3])
        copies = prefix.copies
        with running(model, num_blocks=2) as manager:  # two blocks: one request at a time
            names = [manager.add_request(ids) for ids in TEXTS[:3] * 2]
            manager.cancel_request(names[-1])
            found = collect(manager, names[:-1])
            pool = manager.batch_processor.cache
        assert [found[name].generated_tokens for name in names[:-1]] == (wanted * 2)[:-1]
        assert prefix.copies - copies in (5, 6) and not pool.beginnings
        assert all(torch.equal(prefix.positions(layer), before[layer]) for layer in range(2))


def test_blocks_of_what_is_kept_beside_a_prompt():
    """Under turns="first" a request claims blocks for the prefix's tokens and all of its own."""
    model = make("llama_gqa")
    with kvpatch.patched(model, "snapkv", 32, window=8, turns="first") as patch:
        patch.prefix(LONG)
        ids = LONG + prompts((60,))[0]
        with running(model, num_blocks=6) as manager:
            found = collect(manager, [name := manager.add_request(ids, max_new_tokens=12)])
        assert "needs 7 blocks of 16 tokens, but there are 6" in found[name].error  # 32 + 60 + 12
