"""Graphs of steps that Triton's kernels run, in its interpreter."""

import pytest

from tests.backends import on_triton  # isort: skip
from tests.hooks.test_graph import _as_on_a_device, replays  # noqa: F401

pytestmark = [pytest.mark.usefixtures("no_gradients"), pytest.mark.slow]
CASES = [
    ("llama_gqa", "h2o", {"k": 9}),
    ("llama_gqa", "keyformer", {"k": 9, "tau": (1.0, 3.0), "generation_length": 6}),
    ("mpt", "roco", {"k": 9}),
    ("llama_gqa", "h2o", {"k": 9, "bits": 8}),
]


@pytest.mark.slow
@pytest.mark.skipif(on_triton.GPU, reason="stands for a GPU")
@pytest.mark.parametrize(("name", "policy", "options"), CASES, ids=str)
def test_replayed_kernels_are_the_model_s_steps(name, policy, options):
    report = replays(name, policy, options | {"backend": "triton"}, prompts=2, layers=1)
    assert report.backends["decode"][0] == "triton"
