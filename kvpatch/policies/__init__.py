"""What to keep: scores, scopes, budgets, selection, and the table that puts them together."""

from .allocation import Adaptive, Pyramid
from .policy import POLICIES, Policy, adaptive, critical, get_policy, policies, pyramid, register_policy
from .scopes import DeviationScope, Scope
from .scores import Score
from .selection import TwoStage

__all__ = [
    "POLICIES",
    "Adaptive",
    "DeviationScope",
    "Policy",
    "Pyramid",
    "Scope",
    "Score",
    "TwoStage",
    "adaptive",
    "critical",
    "get_policy",
    "policies",
    "pyramid",
    "register_policy",
]
