"""The backend for CUDA without a GPU: CUDA's own platform chooses it, and Triton's kernels run in their interpreter."""

import json

import pytest

from tests.vllm.models import POLICIES, prompts
from tests.vllm.pretend import COPIES, KERNELS
from tests.vllm.test_tokens import Answers, K, job

pytest.importorskip("vllm")
pytest.importorskip("triton")
pytestmark = pytest.mark.slow
TEXTS, NEW = prompts((20, 60)), 4
CUDA, CPU = "kvpatch.serving.vllm.cuda.Backend", "kvpatch.serving.vllm.backend.Backend"
CUSTOM = {"attention_backend": "CUSTOM"}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return Answers(tmp_path_factory.mktemp("vllm"), cuda=True)


def test_tokens_and_pages(answers):
    """Asked for by name, or by the variable alone: generate()'s tokens, from pages that steps read where they lie."""
    few = {"sampling": {"max_tokens": NEW, "temperature": 0}}
    variable = json.dumps({"policy": "roco", "k": K})
    found = answers.of(
        [
            job("Llama", "h2o", TEXTS, options=CUSTOM, **few),
            {"model": "Llama", "prompts": TEXTS, "variable": variable, **few},
            job("Mistral", "snapkv", TEXTS, options={**CUSTOM, "block_size": 16}, **few),
        ]
    )
    for answer, (family, policy) in zip(found, (("Llama", "h2o"), ("Llama", "roco"), ("Mistral", "snapkv")), strict=True):
        assert "error" not in answer, answer
        expected = answers.generated(family, TEXTS, policy, **POLICIES[policy])
        assert answer["tokens"] == [[tokens[:NEW]] for tokens in expected], policy
        assert answer["seen"] == sorted([CUDA, KERNELS]), f"{policy}: {COPIES}"


def test_without_settings(answers):
    (answer,) = answers.of([{"model": "Llama", "prompts": TEXTS, "options": CUSTOM}])
    assert "attention backend CUSTOM, which is kvpatch's here, without kvpatch's settings: give" in answer["error"]
    assert answer["seen"] == [CUDA]
