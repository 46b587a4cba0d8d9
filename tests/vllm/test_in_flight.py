"""Requests in flight at the same bytes: with a budget never fewer than with vLLM's own cache, short prompts or long ones."""

import random

import pytest

from tests.vllm.models import prompts
from tests.vllm.test_tokens import Answers

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow
SLOTS, K, NEW = 2912, 256, 12
PAGES = (32, 128)  # slots of vLLM's own pages on a CPU: the least, and the usual ones
PAGE = 16  # and of kvpatch's
SIZES = {"max_model_len": 1024, "max_num_seqs": 64, "max_num_batched_tokens": 1024, "enable_prefix_caching": False}


def loads():
    rnd = random.Random(0)
    short, long = ([rnd.randrange(*span) for _ in range(n)] for span, n in (((40, 61), 30), ((400, 901), 8)))
    mixed = short[:15] + long[:4]
    rnd.shuffle(mixed)
    return {"short": short, "long": long, "mixed": mixed}


def test_never_fewer_than_plain_vllm(tmp_path):
    """In steps, too: requests that run beside each other end sooner."""
    jobs = []
    for lengths in loads().values():
        texts = [[token % 500 + 2 for token in range(first, first + n)] for first, n in enumerate(lengths)]
        asked = {"model": "Llama", "prompts": texts, "lengths": [NEW] * len(texts)}
        for page in PAGES:
            jobs.append({**asked, "options": {**SIZES, "block_size": page, "num_gpu_blocks_override": SLOTS // page}})
        budgeted = {**SIZES, "num_gpu_blocks_override": SLOTS // PAGE}
        jobs.append({**asked, "settings": {"policy": "h2o", "k": K}, "options": budgeted})
    found = iter([answer["running"] for answer in Answers(tmp_path).of(jobs)])
    for name in loads():
        *plain, budgeted = next(found), next(found), next(found)
        print(name, [(max(running), sum(running) / len(running), len(running)) for running in (*plain, budgeted)])
        assert all(max(budgeted) >= max(own) and len(budgeted) <= len(own) for own in plain), name


def test_short_requests_claim_what_they_need(tmp_path):
    """Pages for the prompt and the tokens to generate, up to k + 1; beside long ones their tokens are generate()'s."""
    answers, lengths = Answers(tmp_path), [12, 1, 30, 90, 5, 12]
    texts = prompts((20, 100, 300, 9, 150, 60))
    asked = {"model": "Llama", "settings": {"policy": "h2o", "k": 64}, "prompts": texts, "lengths": lengths}
    pages = sum(-(-min(65, len(ids) + new) // PAGE) for ids, new in zip(texts, lengths, strict=True))
    all_at_once, waiting = answers.of(
        [{**asked, "options": {"max_num_seqs": 8, "num_gpu_blocks_override": 1 + blocks}} for blocks in (pages, pages - 1)]
    )
    assert max(all_at_once["running"]) == 6 and max(waiting["running"]) == 5
    for ids, new, one, other in zip(texts, lengths, all_at_once["tokens"], waiting["tokens"], strict=True):
        assert one == other == answers.generated("Llama", [ids], "h2o", 64, new)
