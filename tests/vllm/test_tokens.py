"""vLLM under a budget gives the tokens that generate() gives under a patch with the same settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpatch
from tests.vllm.models import POLICIES, prompts, save

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
NEW, K = 32, 24
TEXTS = prompts((20, 40, 100, 150, 300, 77, 9))
APART = {"enable_prefix_caching": False, "block_size": 16}
SOME = ("h2o", "roco", "snapkv", "streaming_llm")


class Answers:
    """What vLLM answers to jobs, all run in one process. cuda: as if on CUDA (pretend.py)."""

    def __init__(self, folder: Path, cuda: bool = False) -> None:
        self.folder, self.models, self.cuda = folder, dict[str, Any](), cuda

    def model(self, family: str) -> Any:
        if family not in self.models:
            self.models[family] = save(family, self.folder / family)
        return self.models[family]

    def of(self, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        asked = [self._complete(job) for job in jobs]
        (self.folder / "jobs.json").write_text(json.dumps(asked))
        run = [sys.executable, "-m", "tests.vllm.serve", str(self.folder / "jobs.json"), str(self.folder / "answers.json")]
        environment = {**os.environ, "TRITON_INTERPRET": "1"} if self.cuda else None
        run += ["--cuda"] if self.cuda else []
        done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=3000, env=environment)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads((self.folder / "answers.json").read_text())

    def _complete(self, job: dict[str, Any]) -> dict[str, Any]:
        """Return a job with what most have in common, whose model is in its folder."""
        self.model(job["model"])
        usual = {"options": {}, "sampling": {"max_tokens": NEW, "temperature": 0}}
        beside = {"beside": self._complete(job["beside"])} if "beside" in job else {}
        return {**usual, **job, **beside, "model": str(self.folder / job["model"])}

    def generated(
        self, family: str, texts: list[list[int]], policy: str | None, k: int | float | str = K, new: int = NEW, **settings: Any
    ) -> list[list[int]]:
        """The tokens of generate(), text by text."""
        model = self.model(family)
        given = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

        def alone(ids: list[int]) -> list[int]:
            return model.generate(torch.tensor([ids]), **given)[0, len(ids) :].tolist()

        if policy is None:
            return [alone(ids) for ids in texts]
        with kvpatch.patched(model, policy, k, **settings):
            return [alone(ids) for ids in texts]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return Answers(tmp_path_factory.mktemp("vllm"))


def job(family: str, policy: str, texts: list[list[int]] = TEXTS, **more: Any) -> dict[str, Any]:
    own = {"generation_length": NEW} if policy == "keyformer" else {}  # generate() knows it from max_new_tokens
    return {"model": family, "settings": {"policy": policy, "k": K, **POLICIES[policy], **own}, "prompts": texts, **more}


def first(answer: dict[str, Any]) -> list[list[int]]:
    assert "error" not in answer, answer
    return [sequences[0] for sequences in answer["tokens"]]


def differ(got: list[list[int]], expected: list[list[int]], policy: str) -> list[int]:
    """The step at which each text that differs does so first.

    Norms of keys are equal but for rounding where a text has a token twice: under key_norm chance decides from there on.
    """
    steps = []
    for ids, one, other in zip(TEXTS, got, expected, strict=True):
        known = [step for step in range(NEW) if policy == "key_norm" and other[step] in (*ids, *other[:step])]
        steps += [step for step in range(min(known, default=NEW)) if one[step] != other[step]][:1]
    return steps


def test_policies(answers):
    found = {}
    for policy, answer in zip(POLICIES, answers.of([job("Llama", policy) for policy in POLICIES]), strict=True):
        found[policy] = differ(first(answer), answers.generated("Llama", TEXTS, policy, **POLICIES[policy]), policy)
    assert not any(found.values()), found


@pytest.mark.parametrize("family", ["GPT2", "Bloom", "Mistral", "Qwen2", "Qwen3", "Gemma2"])
def test_models(answers, family):
    found, options = {}, {"enable_prefix_caching": False} if family == "Gemma2" else {}
    for policy, answer in zip(SOME, answers.of([job(family, policy, options=options) for policy in SOME]), strict=True):
        found[policy] = differ(first(answer), answers.generated(family, TEXTS, policy, **POLICIES[policy]), policy)
        if policy == "h2o":
            assert first(answer) != answers.generated(family, TEXTS, None), family
    assert not any(found.values()), found


def test_a_prompt_read_in_chunks_is_one_read_in_blocks(answers):
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 64}
    for policy, answer in zip(SOME, answers.of([job("Llama", policy, options=options) for policy in SOME]), strict=True):
        assert first(answer) == answers.generated("Llama", TEXTS, policy, **POLICIES[policy], block=64), policy


@pytest.mark.parametrize("k", ["60KiB", 0.4])
def test_budgets(answers, k):
    """A size is each request's, in all layers; a share is of its own prompt, by which it claims pages."""
    options = {"enable_chunked_prefill": False, "block_size": 16}
    jobs = [job("Llama", policy, options=options) for policy in SOME]
    for one in jobs:
        one["settings"] |= {"k": k}
    for policy, answer in zip(SOME, answers.of(jobs), strict=True):
        assert first(answer) == answers.generated("Llama", TEXTS, policy, k, **POLICIES[policy]), policy


def test_layers_that_hold_different_numbers(answers):
    """Each number has pages of its own, whoever comes and goes."""
    policies = {"pyramidkv": {"window": 8}, "pyramid(h2o)": {}}
    jobs = [
        {**job("Llama", "h2o", TEXTS, options=APART, **more), "settings": {"policy": policy, "k": K, **options}}
        for policy, options in policies.items()
        for more in ({}, {"arrivals": 1})
    ]
    found = answers.of(jobs)
    for policy, options in policies.items():
        expected = answers.generated("Llama", TEXTS, policy, **options)
        whole, scheduled = found.pop(0), found.pop(0)
        assert first(whole) == expected, policy
        assert all(one is None or one == [tokens] for one, tokens in zip(scheduled["tokens"], expected, strict=True)), policy


def test_pages_of_a_share_are_the_prompt_s(answers):
    """Requests that come and go, with 4 pages of 16 slots at the most for 100 tokens of prompt."""
    texts = prompts(tuple(20 + 13 * index % 80 for index in range(16)), seed=1)
    asked = job("Llama", "h2o", texts, arrivals=2, options={"enable_chunked_prefill": False, "block_size": 16})
    asked["settings"] |= {"k": 0.4}
    (answer,) = answers.of([asked])
    expected = answers.generated("Llama", texts, "h2o", 0.4)
    assert all(one is None or one == [tokens] for one, tokens in zip(answer["tokens"], expected, strict=True))
    assert 4 < answer["pages"] <= 4 * 3


def test_requests_come_and_are_cancelled(answers):
    """Whoever else comes and goes, a request's tokens stay the same, and it has two pages of 16 slots for 24 tokens."""
    texts = prompts(tuple(20 + 13 * index % 180 for index in range(24)), seed=1)
    jobs = [job("Llama", policy, texts, arrivals=seed) for seed, policy in enumerate(SOME)]
    for policy, answer in zip(SOME, answers.of(jobs), strict=True):
        expected = answers.generated("Llama", texts, policy, **POLICIES[policy])
        got = answer["tokens"]
        assert [one for one in got if one is None], "some are cancelled"
        assert all(one is None or one == [tokens] for one, tokens in zip(got, expected, strict=True)), policy
        assert policy == "snapkv" or answer["pages"] <= 4 * 2


def test_requests_that_find_no_page_wait(answers):
    """None is preempted: with two pages for requests, the others wait until one is free."""
    few = job("Llama", "h2o", arrivals=5, cancelled=0, options={"num_gpu_blocks_override": 3})
    (answer,) = answers.of([few])
    assert "error" not in answer, answer
    assert first(answer) == answers.generated("Llama", TEXTS, "h2o") and answer["pages"] == 2


def test_a_text_far_longer_than_the_budget(answers):
    """It keeps its two pages, whatever max_model_len is."""
    texts, new = TEXTS[:1], 1000
    sampling = {"max_tokens": new, "temperature": 0}
    long = job("Llama", "h2o", texts, arrivals=0, cancelled=0, options={"max_model_len": 2048}, sampling=sampling)
    (answer,) = answers.of([long])
    assert first(answer) == answers.generated("Llama", texts, "h2o", new=new) and answer["pages"] == 2


def test_a_request_that_is_too_long_fails_alone(answers):
    asked = job("Llama", "h2o", first=[prompts((500,))[0] + [3] * 20, TEXTS[0]])
    (answer,) = answers.of([asked])
    (refused,) = answer["refused"]
    assert "512" in refused and first(answer) == answers.generated("Llama", TEXTS, "h2o")


def test_what_the_log_says(answers):
    """Prefix caching is off, which is said once, as are the budget and a request's bytes; one that evicts nothing is noted."""
    _, usual, none, off = answers.of(
        [
            job("Llama", "h2o", TEXTS[:1]),  # vLLM sets up its logging anew with a process's first engine
            job("Llama", "h2o", TEXTS[:1]),
            {**job("Llama", "h2o", TEXTS[:1]), "settings": {"policy": "h2o", "k": 512}},
            job("Llama", "h2o", TEXTS[:1], options={"enable_prefix_caching": False}),
        ]
    )
    cached = "[kvpatch] prefix caching is off under a budget."
    few, all_ = "k=24: a request takes 2 pages", "k=512: a request takes 32 pages"  # a slot has 2 * 2 * 32 numbers of 4 bytes
    assert all(
        found["said"][-1].startswith(f"[kvpatch] policy h2o, {few} of 16 slots in 3 layers, 0.0492 MB of keys and")
        for found in (usual, off)
    )
    assert none["said"][-1].startswith(f"[kvpatch] policy h2o, {all_} of 16 slots in 3 layers, 0.786 MB of keys and values")
    assert all(
        "such requests fit, and prompts are read in pieces of at most" in found["said"][-1] for found in (usual, off, none)
    )
    assert usual["said"][:-1] == [cached] and off["said"][:-1] == []
    assert none["said"][:-1] == [cached, "[kvpatch] k=512 is not below max_model_len=512: nothing is evicted."]
    assert first(none) == answers.generated("Llama", TEXTS[:1], None)


def test_several_sequences_and_seeds(answers):
    greedy = {"sampling": {"max_tokens": NEW, "temperature": 0, "n": 1}}
    drawn = {"sampling": {"max_tokens": NEW, "temperature": 0.9, "seed": 5, "n": 3}}
    alone = {**drawn, "options": {"max_num_seqs": 1}}
    one, three, again = answers.of([job("Llama", "h2o", **greedy), job("Llama", "h2o", **drawn), job("Llama", "h2o", **alone)])
    assert three["tokens"] == again["tokens"], "whichever others are drawn beside it"
    assert all(len({tuple(one) for one in sequences}) > 1 for sequences in three["tokens"])
    assert three["tokens"] != one["tokens"]


def test_two_processes(answers):
    options = {"tensor_parallel_size": 2}
    policies = ("h2o", "tova", "random", "critical_snapkv")
    jobs = [job("Llama", policy, options=options) for policy in policies]
    for policy, answer in zip(policies, answers.of(jobs), strict=True):
        assert first(answer) == answers.generated("Llama", TEXTS, policy, **POLICIES[policy]), policy


def test_without_settings_vllm_is_vllm(answers):
    """Also in a process where an engine had a budget, and by the variable instead of the configuration."""
    plain = {"model": "Llama", "prompts": TEXTS}
    variable = {**plain, "variable": json.dumps({"policy": "h2o", "k": K})}
    own, budgeted, again = answers.of([plain, variable, plain])
    assert first(own) == first(again) == answers.generated("Llama", TEXTS, None)
    assert first(budgeted) == answers.generated("Llama", TEXTS, "h2o") != first(own)


def test_two_engines_of_one_process(answers):
    """Each has its own settings, or none, whichever was made last."""
    few = {"model": "Llama", "prompts": TEXTS[2:4]}
    jobs = {one: {**few, "settings": one and {"policy": one, "k": K}} for one in ("h2o", "streaming_llm", None)}
    pairs = [("h2o", None), (None, "h2o"), ("h2o", "streaming_llm")]
    found = answers.of([{**jobs[one], "beside": jobs[other]} for one, other in pairs])
    for (one, other), answer in zip(pairs, found, strict=True):
        for policy, got in ((one, answer), (other, answer["beside"])):
            assert first(got) == answers.generated("Llama", TEXTS[2:4], policy), (one, other)


FEW, OFFLOADED = {"num_gpu_blocks_override": 2}, {"kv_offloading_size": 1.0}
DRAFT = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}}


@pytest.mark.parametrize(
    ("policy", "options", "words"),
    [
        ({"policy": "pyramidkv", "k": K}, {}, "give enable_prefix_caching=False"),
        ({"policy": "h2o", "k": 0.4}, {}, "Give enable_chunked_prefill=False"),
        ("h2o", {"kv_cache_dtype": "fp8"}, "fp8 keys in vLLM, since it reads and writes pages in the model's own type"),
        ("h2o", DRAFT, "speculative decoding takes tokens back"),
        ("h2o", FEW, "takes 0.0492 MB of keys and values, and there are 0.0246 MB: give a smaller k"),
        ("h2o", OFFLOADED, "a KV connector moves blocks of a whole text. Leave kv_transfer_config and kv_offloading_size out"),
        ("h2p", {}, "Unknown policy 'h2p'. Did you mean 'h2o'?"),
        (None, {"additional_config": {"kvpach": {"policy": "h2o", "k": K}}}, "Did you mean 'kvpatch'?"),
    ],
)
def test_refused_at_start(answers, policy, options, words):
    """Each in a process of its own: vLLM does not start again after an error."""
    settings = {"policy": policy, "k": K} if isinstance(policy, str) else policy
    asked = {"model": "Llama", "settings": settings, "options": options, "prompts": TEXTS}
    (answer,) = answers.of([asked])
    assert words in answer["error"] and "KVPatchError" in answer["error"], answer


def test_latent_vectors_are_refused(answers):
    """Their attention is another of vLLM's backends."""
    (answer,) = answers.of([{"model": "DeepseekV2", "settings": {"policy": "h2o", "k": K}, "prompts": TEXTS[:1]}])
    assert "this model's keys and values are one latent vector" in answer["error"] and "KVPatchError" in answer["error"], answer
