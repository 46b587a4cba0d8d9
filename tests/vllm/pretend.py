"""vLLM's build for CPUs as if on CUDA: the plugin registers for CUDA, and CUDA's platform chooses the backends.

Models run on the CPU, and Triton's kernels in its interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import functools
import os
import sys
from types import ModuleType
from typing import Any

SEEN: set[str] = set()
"""The backends that CUDA's platform chose, and how steps have read pages."""
KERNELS, COPIES = "kernels read pages", "pages are copied"


def pretend(variable: str | None) -> None:
    """Put a platform in place of vLLM's, and load plugins. variable: KVPATCH_VLLM in their environment."""
    import vllm.platforms
    from vllm import plugins
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends import registry

    sys.modules.setdefault("vllm._C_stable_libtorch", ModuleType("vllm._C_stable_libtorch"))  # of builds for CUDA
    from vllm.platforms.cuda import CudaPlatformBase

    class Pretended(CpuPlatform):
        get_valid_backends = classmethod(CudaPlatformBase.get_valid_backends.__func__)

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_attn_backend_cls(cls, *told: Any, **more: Any) -> str:
            chosen = CudaPlatformBase.get_attn_backend_cls.__func__(cls, *told, **more)
            SEEN.add(chosen)
            return chosen

    class Registering(Pretended):
        def is_cpu(self) -> bool:
            return False

        def is_cuda(self) -> bool:
            return True

    registry._ATTN_OVERRIDES.clear()
    selector._cached_get_attn_backend.cache_clear()
    plugins.plugins_loaded = False
    os.environ.pop("KVPATCH_VLLM", None)
    if variable is not None:
        os.environ["KVPATCH_VLLM"] = variable
    vllm.platforms._current_platform = Registering()
    plugins.load_general_plugins()
    vllm.platforms._current_platform = Pretended()
    _watch()


@functools.cache
def _watch() -> None:
    """Ask for kernels, as "auto" does on a GPU, and note how steps get at keys: where they lie, or as copies."""
    from kvpatch.backends.triton import decode
    from kvpatch.cache.paged import PagedSlots
    from kvpatch.serving.vllm import attention

    attention.CacheSettings = functools.partial(attention.CacheSettings, backend="triton")
    step, read = decode.step, PagedSlots._read_strips

    def stepped(*told: Any, **more: Any) -> Any:
        SEEN.add(KERNELS)
        return step(*told, **more)

    def copied(self: Any, *told: Any) -> Any:
        SEEN.add(COPIES)
        return read(self, *told)

    decode.step, PagedSlots._read_strips = stepped, copied
