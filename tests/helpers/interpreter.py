"""Triton's interpreter, made faster: it runs the library's kernels where there is no GPU."""

from __future__ import annotations

import functools
from typing import Any


def quicken() -> None:
    """Let the interpreter replace Triton's language once for a launch; by itself it does so again for each function within.

    Other releases of Triton than those with these private names are left as they are, and slower.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    if not {"_LangPatchScope", "_patch_lang", "_get_np_dtype"} <= vars(interpreter).keys():
        return
    replace, languages = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    replaced: set[int] = set()  # in the launch that runs

    class Launch(interpreter._LangPatchScope):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def restore(self) -> None:
            replaced.clear()
            self.inner.restore()

    def once(function: Any) -> Any:
        seen = {id(value) for value in function.__globals__.values() if any(value is one for one in languages)}
        if replaced and seen <= replaced:
            return interpreter._LangPatchScope()  # nothing to put back
        scope = replace(function) if replaced else Launch(replace(function))
        replaced.update(seen)
        return scope

    interpreter._patch_lang = once
    look_up = interpreter._get_np_dtype
    known = functools.cache(look_up)

    def data_type(of: Any) -> Any:
        of = of.element_ty if isinstance(of, interpreter.tl.block_type) else of
        return look_up(of) if isinstance(of, interpreter.tl.pointer_type) else known(of)

    interpreter._get_np_dtype = data_type
