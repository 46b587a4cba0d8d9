"""Graphs of steps that Triton's kernels run, in its interpreter."""

import pytest
import torch

from tests.backends import on_triton  # isort: skip
import kvpatch
from kvpatch.hooks.graph import StepGraph
from tests.helpers.comparing import same_tokens
from tests.helpers.recording import FakeRecorder
from tests.helpers.tiny import make
from tests.hooks.test_graph import _as_on_a_device, replays, steps  # noqa: F401

pytestmark = [pytest.mark.usefixtures("no_gradients"), pytest.mark.slow]
CASES = [
    ("llama_gqa", "h2o", {"k": 9}),
    ("llama_gqa", "keyformer", {"k": 9, "tau": (1.0, 3.0), "generation_length": 6}),
    ("mpt", "roco", {"k": 9}),
    ("llama_gqa", "h2o", {"k": 9, "bits": 8}),
]


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.skipif(on_triton.GPU, reason="stands for a GPU")
@pytest.mark.parametrize(("name", "policy", "options"), CASES, ids=str)
def test_replayed_kernels_are_the_model_s_steps(name, policy, options):
    report = replays(name, policy, options | {"backend": "triton"}, prompts=2, layers=1)
    assert report.backends["decode"][0] == "triton"


@pytest.mark.slow
@pytest.mark.skipif(on_triton.GPU, reason="stands for a GPU")
@pytest.mark.parametrize(("policy", "options"), [("h2o", {}), ("snapkv", {"window": 4, "room": 8})], ids=str)
def test_kernels_of_prompts_of_one_capacity_class_share_a_graph(policy, options):
    """The kernel that names the next slot finds it among several empty ones."""
    model, room = make("llama_gqa", layers=1), options.pop("room", None)
    with kvpatch.patched(model, policy, 0.5, backend="triton", **options) as patch:
        want, kept = steps(patch, model, [24, 30], room)
        graph = StepGraph(model, patch._state, FakeRecorder)
        got, found = steps(patch, model, [24, 30], room, graph)
        assert patch.report().backends["decode"][0] == "triton"
    torch.testing.assert_close(got, want, atol=2e-5, rtol=0)
    assert same_tokens(found, kept) and graph.captures == 1
