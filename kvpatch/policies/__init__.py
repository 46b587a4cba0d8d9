"""Eviction policies: scores, scopes, budgets, selection, and the table of named policies built from them."""

from .allocation import Adaptive, Global, Pyramid
from .calibration import Calibration
from .context import EvictionContext, NewTokens
from .merging import Merge
from .moving import Mass, Share, Threshold
from .policy import Policy
from .presets import (
    POLICIES,
    adaptive,
    chunked,
    critical,
    get_policy,
    global_topk,
    list_policies,
    merged,
    pyramid,
    register_policy,
    unregister_policy,
)
from .repeated import repeat_instruction
from .scopes import DeviationScope, RangeScope, Scope
from .scores import Score
from .selection import Chunked, Selection, TwoStage

__all__ = [
    "POLICIES",
    "Adaptive",
    "Calibration",
    "Chunked",
    "DeviationScope",
    "EvictionContext",
    "Global",
    "Mass",
    "Merge",
    "NewTokens",
    "Policy",
    "Pyramid",
    "RangeScope",
    "Scope",
    "Score",
    "Selection",
    "Share",
    "Threshold",
    "TwoStage",
    "adaptive",
    "chunked",
    "critical",
    "get_policy",
    "global_topk",
    "list_policies",
    "merged",
    "pyramid",
    "register_policy",
    "repeat_instruction",
    "unregister_policy",
]
