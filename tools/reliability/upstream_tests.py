"""Run transformers' own tests with every model of a known architecture patched at k=1.0, which must change nothing.

The tests come with transformers' repository, not with its wheel. In a checkout of the version that is installed:

    PYTHONPATH=PATH/TO/kvpatch pytest -p tools.reliability.upstream_tests tests/models/llama tests/models/gpt2 -k generate

A model is patched when it is first called, or asked to generate, and stays so until its test ends; then the patch is removed
and the model is looked at: nothing may be left of it. A model that cannot be patched (another architecture, an
encoder-decoder) runs as it is. The last lines of the run say how many models were patched, and which classes were not.

    --kvpatch-policy NAME   the policy that is to change nothing (h2o)
    --kvpatch-share K       another share than 1.0: to see which tests notice
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
from torch import nn
from transformers import GenerationMixin, PreTrainedModel

import kvpatch


class Patching:
    """The patches of the running test, and what was patched so far."""

    def __init__(self, policy: str, share: float) -> None:
        self.policy, self.share = policy, share
        self.live: list[tuple[nn.Module, kvpatch.Patch]] = []
        self.patched: Counter[str] = Counter()
        self.left: dict[str, str] = {}
        self.classes = pytest.MonkeyPatch()

    def ensure(self, model: Any) -> None:
        """Patch a model that generates, unless it is, or is part of one that is."""
        name = type(model).__name__
        if not isinstance(model, GenerationMixin) or name in self.left or _is_patched(model):
            return
        try:
            self.live.append((model, kvpatch.patch(model, self.policy, self.share)))
            self.patched[name] += 1
        except kvpatch.KVPatchError as error:
            self.left[name] = str(error).split(". ")[0]

    def install(self) -> None:
        for owner, name in ((GenerationMixin, "generate"), (PreTrainedModel, "__call__")):
            self.classes.setattr(owner, name, self._wrapped(getattr(owner, name), name))

    def _wrapped(self, original: Any, name: str) -> Any:
        @functools.wraps(original)
        def run(model: Any, *args: Any, **kwargs: Any) -> Any:
            before = _is_patched(model)
            self.ensure(model)
            if name == "generate" and not before and _is_patched(model):
                return model.generate(*args, **kwargs)  # as it is called from now on
            return original(model, *args, **kwargs)

        return run

    def release(self) -> None:
        """Undo the running test's patches.

        Raises:
            AssertionError: something is left on a model.
        """
        while self.live:
            model, patch = self.live.pop()
            patch.remove()
            assert not _is_patched(model), f"{type(model).__name__} is still patched"
            assert "generate" not in vars(model), f"{type(model).__name__}.generate is still ours"


def _is_patched(model: nn.Module) -> bool:
    return any("_kvpatch" in vars(module) for module in model.modules())


LEFT = "ran as it is"
STATE = pytest.StashKey[Patching]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvpatch")
    group.addoption("--kvpatch-policy", default="h2o")
    group.addoption("--kvpatch-share", type=float, default=1.0)


def pytest_configure(config: pytest.Config) -> None:
    patching = Patching(config.getoption("--kvpatch-policy"), config.getoption("--kvpatch-share"))
    patching.install()
    config.stash[STATE] = patching


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[STATE].classes.undo()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    item.config.stash[STATE].release()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    patching = config.stash[STATE]
    many = ", ".join(f"{count} {name}" for name, count in sorted(patching.patched.items())) or "no model"
    terminalreporter.write_line(f"kvpatch: {many} patched with {patching.policy} at {patching.share:g}")
    for name, why in sorted(patching.left.items()):
        terminalreporter.write_line(f"kvpatch: {name} {LEFT}: {why}")
