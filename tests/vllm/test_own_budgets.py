"""Requests with a k of their own: generate()'s tokens under it, pages for it, and a refusal of one request alone."""

import pytest

from kvpatch.serving.vllm.terms import OWN
from tests.vllm.models import POLICIES, prompts
from tests.vllm.test_tokens import TEXTS, Answers, K, job

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow
CHECKED = {"logits_processors": ["kvpatch.serving.vllm.admission:Budgets"]}
MOST = 100


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return Answers(tmp_path_factory.mktemp("vllm"))


def asked_k(index):
    """The k of a request, 0 for that of the start: of four in turn, one evicts nothing of most texts."""
    return (0, 12, 40, MOST)[index % 4]


def asking(policy, texts, **more):
    """A job whose requests ask for budgets."""
    asked = job("Llama", policy, texts, asks=[{OWN: asked_k(index)} if asked_k(index) else None for index in range(len(texts))])
    asked["settings"] |= {"max_k": MOST}
    return asked | more


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_each_request_has_its_own(answers, family):
    """Side by side and one after the other, in chunks or not; a layer with a sliding window holds that, whatever k is."""
    policies = ("h2o", "snapkv") if family == "Llama" else ("h2o",)
    options = {"enable_prefix_caching": False} if family == "Gemma2" else {}
    jobs = [asking(policy, TEXTS, model=family, options=options) for policy in policies]
    jobs += [asking("h2o", TEXTS, model=family, options={**options, "max_num_batched_tokens": 64, "max_num_seqs": 1})]
    for policy, block, answer in zip((*policies, "h2o"), (*[None] * len(policies), 64), answers.of(jobs), strict=True):
        assert "error" not in answer, answer
        for index, (ids, tokens) in enumerate(zip(TEXTS, answer["tokens"], strict=True)):
            expected = answers.generated(family, [ids], policy, asked_k(index) or K, **POLICIES[policy], block=block)
            assert tokens == expected, (policy, block, index)


def test_they_come_and_are_cancelled(answers):
    """Their pages come and go with them."""
    texts = prompts(tuple(20 + 13 * index % 180 for index in range(24)), seed=1)
    policies = ("h2o", "streaming_llm", "snapkv")
    for policy, answer in zip(policies, answers.of([asking(one, texts, arrivals=3) for one in policies]), strict=True):
        assert "error" not in answer, answer
        compared = 0
        for index, (ids, tokens) in enumerate(zip(texts, answer["tokens"], strict=True)):
            if tokens is not None:
                compared += 1
                assert tokens == answers.generated("Llama", [ids], policy, asked_k(index) or K, **POLICIES[policy]), (
                    policy,
                    index,
                )
        assert 12 < compared < 24


def test_pages_are_claimed_for_a_request_s_own_k(answers):
    """With one page less, one request waits."""
    new = 5
    pages = sum(-(-min((asked_k(index) or K) + 1, len(ids) + new) // 16) for index, ids in enumerate(TEXTS))
    more = {"lengths": [new] * len(TEXTS)}
    sizes = [{"max_num_seqs": 8, "num_gpu_blocks_override": 1 + blocks} for blocks in (pages, pages - 1)]
    all_at_once, waiting = answers.of([asking("h2o", TEXTS, options=options, **more) for options in sizes])
    assert max(all_at_once["running"]) == len(TEXTS) and max(waiting["running"]) == len(TEXTS) - 1
    assert all_at_once["tokens"] == waiting["tokens"]


def test_two_processes(answers):
    (answer,) = answers.of([asking("h2o", TEXTS, options={"tensor_parallel_size": 2})])
    for index, (ids, tokens) in enumerate(zip(TEXTS, answer["tokens"], strict=True)):
        assert tokens == answers.generated("Llama", [ids], "h2o", asked_k(index) or K), index


def test_refused_alone(answers):
    """In words, before the engine sees it; without the check a request that cannot have its k has that of the start."""
    bad = [{OWN: MOST + 1}, {OWN: 0}, {OWN: "64"}, {OWN: True}, {OWN: 2.5}, {"kvpatch_policy": "snapkv"}, {"kvpach_k": 3}]
    asked = {"first_asks": [*bad, {OWN: 12}, {"other": 1}]}
    checked, unchecked, divided = answers.of(
        [
            asking("h2o", TEXTS, options=CHECKED, **asked),
            asking("h2o", TEXTS, **asked),
            {
                **job("Llama", "h2o", TEXTS[:1], first_asks=[{OWN: 12}], options={**CHECKED, "enable_prefix_caching": False}),
                "settings": {"policy": "pyramid(h2o)", "k": K},
            },
        ]
    )
    assert len(checked["refused"]) == len(bad), "the last two are served"
    for words, refused in zip(
        ("=101 must", "=0 must", "='64' must", "=True must", "=2.5 must"), checked["refused"], strict=False
    ):
        assert f"{OWN}{words} be a number of tokens from 1 to {MOST}" in refused
    assert all(
        "which nothing reads: of a request's budget 'kvpatch_k' alone is its own" in one for one in checked["refused"][5:]
    )
    for index, (ids, tokens) in enumerate(zip(TEXTS, checked["tokens"], strict=True)):
        assert tokens == answers.generated("Llama", [ids], "h2o", asked_k(index) or K), "the engine goes on"
    assert not unchecked["refused"] and unchecked["tokens"] == checked["tokens"]
    assert sum("'64' of a request is not served: it has the k of the start" in one for one in unchecked["said"]) == 1
    (refused,) = divided["refused"]
    assert "policy 'pyramid_h2o' gives layers different numbers of tokens, which a request cannot choose" in refused
