"""kvpatch: one line puts a Hugging Face decoder's KV cache on a budget.

Dimension key, used in names throughout (`k_BHTD`, `score_BHT`):
    B batch rows, H KV heads, G query heads per KV head, Q new queries, T tokens held, S slots, D head size,
    L layers, E model width; N any part of B*H, R rows and M keys of a block.
"""

__version__ = "0.1.0"

from .arch import Adapter, InterfaceAdapter, architectures, register_arch
from .cache import EvictingCache
from .check import check_model
from .errors import KVPatchError
from .patching import Patch, patch, patched
from .policies import Policy, get_policy, policies, register_policy
from .report import Report

__all__ = [
    "Adapter",
    "EvictingCache",
    "InterfaceAdapter",
    "KVPatchError",
    "Patch",
    "Policy",
    "Report",
    "architectures",
    "check_model",
    "get_policy",
    "patch",
    "patched",
    "policies",
    "register_arch",
    "register_policy",
]
