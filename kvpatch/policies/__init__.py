"""What to keep: scores, scopes, budgets, selection, and the table that puts them together."""

from .policy import POLICIES, Policy, get_policy, policies, register_policy
from .scopes import DeviationScope, Scope
from .scores import Score

__all__ = [
    "POLICIES",
    "DeviationScope",
    "Policy",
    "Scope",
    "Score",
    "get_policy",
    "policies",
    "register_policy",
]
