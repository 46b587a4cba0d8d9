"""Kernels are compiled ahead: the made-up prompt launches what a request launches, and leaves no trace."""

import pytest
import torch

import kvpatch
from kvpatch.arch.llama import LlamaAdapter
from tests.helpers.marks import slow_but
from tests.helpers.tiny import force, make, prompt

pytest.importorskip("triton")

from kvpatch.backends.triton import columns, decode

pytestmark = pytest.mark.usefixtures("no_gradients")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONSTANTS = (bool, str, type(None))


class Noting:
    """A kernel that notes what of its launches is constant: which arguments are there, flags, names and options."""

    def __init__(self, kernel, seen):
        self.kernel, self.seen = kernel, seen

    def __getitem__(self, grid):
        def run(*args, **kwargs):
            given = (*args, *kwargs.values())
            self.seen.add((self.kernel, *(one if isinstance(one, CONSTANTS) else type(one).__name__ for one in given)))
            return self.kernel[grid](*args, **kwargs)

        return run


@pytest.fixture
def seen(monkeypatch):
    """What was launched."""
    found = set()
    for module in (columns, decode):
        for name, kernel in list(vars(module).items()):
            if name.endswith("_kernel"):
                monkeypatch.setattr(module, name, Noting(kernel, found))
    return found


@pytest.mark.parametrize("policy", slow_but((), ("h2o", "keyformer")))
def test_requests_launch_nothing_that_is_new(policy, seen):
    """Of one row and of padded rows, whatever their length."""
    model = make("llama_gqa").to(DEVICE)
    mask = torch.ones(2, 45, dtype=torch.long, device=DEVICE)
    mask[1, :9] = 0
    with kvpatch.patched(model, policy, 0.5, backend="triton") as patch:
        patch.warmup(tokens=24, batch_size=2)
        before = set(seen)
        assert before and patch.passes == {}
        model.generate(prompt(1, 37).to(DEVICE), max_new_tokens=4, do_sample=False, pad_token_id=0)
        model.generate(prompt(2, 45).to(DEVICE), attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert seen == before


@pytest.mark.parametrize(("k", "length"), [(0.25, 512), (16, 512), (400, 800), (700, 1000), (1.0, 512)])
def test_the_prompt_is_longer_than_the_budget(k, length, monkeypatch):
    """But not than the model's positions."""
    model, read = make("llama"), []
    monkeypatch.setattr(LlamaAdapter, "max_positions", lambda self, config: 1002)
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    with kvpatch.patched(model, "window", k) as patch:
        patch.warmup()
    assert read == [length, 1, 1]


def test_nothing_remains():
    """No pass in the report, no change of what follows; the report of an earlier request stays."""
    model, ids, more = make("llama_gqa"), prompt(1, 30), prompt(1, 3, seed=1)
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        patch.warmup()
        with pytest.raises(kvpatch.KVPatchError, match="Nothing to report"):
            patch.report()
        want, _ = force(model, ids, more)
        passes, held = patch.passes, patch.report().held()
        patch.warmup(tokens=40, batch_size=3)
        assert patch.passes == passes and torch.equal(patch.report().held(), held)
        got, _ = force(model, ids, more)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tokens": 20}, "within the budget, which keeps 20"),
        ({"tokens": 0}, "tokens=0 must be"),
        ({"batch_size": 0}, "batch_size=0 must be a number of rows"),
    ],
)
def test_what_is_refused(arguments, words):
    with kvpatch.patched(make("llama"), "h2o", 20) as patch, pytest.raises(kvpatch.KVPatchError, match=words):
        patch.warmup(**arguments)
