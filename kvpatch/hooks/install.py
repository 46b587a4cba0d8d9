"""Installing a patch in a model, and undoing it.

Each module that a patch changes carries a Mark: how to undo what was changed there. A deep copy of the module has a deep
copy of its mark, so that `unmark_module` restores the copy as well, to what a copy of the unpatched module would be.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import MethodType

from torch import nn

from ..arch.upstream import CANDIDATES, COMPILED, KEPT_MANAGER, MAKE_MASKS, PREPARE_CACHE, START_BATCHING
from . import shell
from .accelerate import own_method, put_hook, replace_forward, replicate
from .attention import make_forward, parameters
from .batching import end_continuous_batching, wrap_generate_batch, wrap_init_batching
from .generate import wrap_generate, wrap_make_masks, wrap_prepare_cache
from .lossless import wrap_candidates
from .offsets import NAME as OFFSETS
from .offsets import has_offsets
from .second_reading import after_decoder
from .state import MISSING, Mark, PatchState, put_attribute
from .target import Target, already_patched

METHODS = ("generate", PREPARE_CACHE, CANDIDATES, START_BATCHING)
"""Methods of a model with generate() in whose place the patch puts its own, which call them."""


@dataclass
class Attribute:
    """The undo of a changed attribute. value: the module's own before the change, or MISSING if it had none."""

    name: str
    value: object

    def __call__(self, module: nn.Module) -> None:
        """Set the attribute to the module's value from before the patch, for `unmark_module`; MISSING removes it."""
        put_attribute(module, self.name, self.value)


class Installation:
    """The changes of one patch to the modules of a model. marked: the modules, in the order in which they were changed."""

    def __init__(self, target: Target, state: PatchState) -> None:
        self.target, self.state = target, state
        self.marked: list[tuple[nn.Module, Mark]] = []

    @property
    def in_force(self) -> bool:
        """True while the model has these changes."""
        return any(vars(module).get("_kvpatch") is mark for module, mark in self.marked)

    def install(self) -> None:
        """Change the model, for `Patch.install`; if that fails or is interrupted, the model is as before.

        Raises:
            KVPatchError: the model is patched already.
        """
        try:
            self._change_model()
        except BaseException:
            self.restore()
            raise

    def _change_model(self) -> None:
        """Replace the attention modules' forwards, hook the decoder and the models around it, and wrap generate().

        `install` calls it once. Each change is noted in its module's mark (the list of its undos) before it is made, so that
        `restore` undoes it.
        """
        target, state = self.target, self.state
        # attention modules. reads: the module has no keys, and uses those of `layer`. Some families need other attributes, too
        for layer, reads, (module, adapter) in target.modules():
            mark = self._mark_module(module)
            for name, value in adapter.attributes(module).items():
                self._set_attribute(module, mark, name, value)
            forward = functools.partial(make_forward, type(module), adapter, layer, reads)
            replace_forward(module, forward, mark.undo.append)
            self._set_attribute(module, mark, "_replicate_for_data_parallel", MethodType(replicate, module))
        # the decoder: attributes that each pass under the patch sets to `ours`, such as ALiBi; and a hook that ends some passes
        mark = self._mark_module(target.decoder)
        for name, ours in state.adapter.overrides(target.decoder).items():
            state.overrides[name] = (vars(target.decoder).get(name, MISSING), ours)
            self._set_attribute(target.decoder, mark, name, state.overrides[name][0])
        if state.settings.rereads or state.settings.layer_numbers is not None or state.lossless:
            put_hook(target.decoder, functools.partial(after_decoder, state=state), mark.undo.append, after=True)
        # a model around the decoder: a hook notes its token ids, if it may merge images or the policy must find marked tokens
        merges = target.outer is not None and target.outer.config is not target.decoder.config
        if target.outer is not None and (merges or state.settings.policy.scope.protect is not None):
            names = parameters(type(target.outer))  # type: ignore[arg-type]
            begin = functools.partial(shell.before_outer, names=names, state=state)
            mark = self._mark_module(target.outer)
            put_hook(target.outer, begin, mark.undo.append)
            if has_offsets(target.outer):  # of a text that was read before the block
                mark.undo.append(Attribute(OFFSETS, vars(target.outer)[OFFSETS]))
        # the pre-hook that begins each pass: at the decoder, or at a model around it that makes its masks
        for module, hook in shell.list_hooks(target.shell, target.decoder, state):
            put_hook(module, hook, self._mark_module(module).undo.append)
        for generator in target.generators:
            self._install_generate(generator, self._mark_module(generator))

    def _install_generate(self, generator: nn.Module, mark: Mark) -> None:
        """Wrap generate() of a model (`generator`) and methods that it calls, for `_change_model`; drop what is compiled."""
        state, changes = self.state, dict[str, object]()  # new values of the model's attributes; MISSING removes one
        state.generators.add(generator)
        originals = {name: own_method(generator, name, vars(generator).get(name)) for name in METHODS}
        changes["generate"] = MethodType(wrap_generate(originals["generate"], state), generator)
        changes[MAKE_MASKS] = wrap_make_masks(getattr(generator, MAKE_MASKS, None))
        changes[PREPARE_CACHE] = MethodType(wrap_prepare_cache(originals[PREPARE_CACHE], state), generator)
        if state.lossless and hasattr(generator, CANDIDATES):
            # makes the object that drafts tokens in assisted decoding
            changes[CANDIDATES] = MethodType(wrap_candidates(originals[CANDIDATES], state), generator)
        if hasattr(generator, START_BATCHING):
            inner = next(name for name, module in generator.named_modules() if module is self.target.decoder)
            start = wrap_init_batching(state, inner, originals[START_BATCHING], self.target.list_placeholders())
            changes[START_BATCHING] = MethodType(start, generator)
            mark.undo.append(end_continuous_batching)
        if not state.settings.transparent and hasattr(generator, START_BATCHING):
            changes["generate_batch"] = MethodType(wrap_generate_batch(), generator)
            changes[KEPT_MANAGER] = MISSING  # the manager of continuous batching made before the patch
        for name in COMPILED:  # attributes with what generate() has compiled
            changes[name] = MISSING
        for name, value in changes.items():
            self._set_attribute(generator, mark, name, value)

    def _set_attribute(self, module: nn.Module, mark: Mark, name: str, value: object) -> None:
        """Set an instance attribute of a module (MISSING removes it), after its undo was added to the module's `mark`."""
        mark.undo.append(Attribute(name, vars(module).get(name, MISSING)))
        put_attribute(module, name, value)

    def _mark_module(self, module: nn.Module) -> Mark:
        """Return a module's mark, the list of its changes and their undo; a first call sets a new one as `_kvpatch`.

        `_change_model` calls it before it changes a module.
        """
        for marked_module, mark in self.marked:
            if marked_module is module:
                return mark
        mark = Mark(self.state.settings.policy.name)
        self.marked.append((module, mark))
        if vars(module).setdefault("_kvpatch", mark) is not mark:  # atomic: one of two threads finds the other's mark
            raise already_patched(module)
        return mark

    def restore(self) -> None:
        """Put the model back, newest change first; modules that another call has restored stay as they are.

        `Patch.restore` calls it when the patch is removed, `install` if it failed. An interrupt is raised after everything is
        restored; the undo that it stopped is run again.
        """
        raised: BaseException | None = None
        failures = 0
        while self.marked:
            try:
                unmark_module(*self.marked[-1])
                self.marked.pop()
                failures = 0
            except BaseException as error:
                # an interrupt (no Exception) does not count as a failure: the undo is run again
                raised, failures = raised or error, failures + isinstance(error, Exception)
                if failures > 1:  # an undo that fails twice is skipped, so that all others still run
                    _skip_undo(self.marked)
                    failures = 0
        try:
            if raised is not None:
                raise raised
        finally:
            raised = None  # else this frame and the error's traceback would keep each other alive


def _skip_undo(marked: list[tuple[nn.Module, Mark]]) -> None:
    """Drop the undo (function that takes a change back) at which `Installation.restore` failed twice, so that it can go on.

    It is the newest undo of the last module of `marked`, which is changed in place; a module without undos is dropped itself.
    """
    if marked[-1][1].undo:
        marked[-1][1].undo.pop()
    else:
        marked.pop()


def unmark_module(module: nn.Module, mark: Mark) -> None:
    """Undo the changes of a patch to a module, newest first, and take its mark off; nothing if it has another mark or none.

    A mark lists a module's changes with their undo. `Installation.restore` calls it when a patch is removed, and so does
    unpatch(). If interrupted, call it again: the change that was being undone is undone once more, which every undo allows.
    """
    attributes = vars(module)
    if attributes.get("_kvpatch") is not mark:
        return
    while mark.undo:
        mark.undo[-1](module)
        mark.undo.pop()
    del attributes["_kvpatch"]
