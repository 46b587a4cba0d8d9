"""Which of the shipped models a section of docs/small-models.md is about."""

from __future__ import annotations

from tools.training.train import RECIPES, SHIPPED

from .task import PYTHON, WALKS

EACH = 3
"""Training seeds of an architecture behind most tables; the primary comparisons take all that are shipped."""

CODE = tuple(name for name, (recipe, _) in SHIPPED.items() if recipe == PYTHON)
WALKERS = tuple(name for name, (recipe, _) in SHIPPED.items() if recipe == WALKS)
SUNK = tuple(name for name, (recipe, _) in SHIPPED.items() if RECIPES[recipe].resting)
"""Those with sinks."""

PLAIN = tuple(name for name in SHIPPED if name not in (*CODE, *WALKERS, *SUNK))
"""Those that look things up, trained without sinks."""


def _among(name: str) -> int:
    """How many models of its recipe come before this one."""
    own = [other for other in PLAIN if SHIPPED[other][0] == SHIPPED[name][0]]
    return own.index(name)


FIFTEEN = tuple(name for name in PLAIN if _among(name) < EACH)
MORE = tuple(name for name in PLAIN if name not in FIFTEEN)
"""Further training seeds, for the primary comparisons alone."""

BESIDE = tuple(name for name in FIFTEEN if f"{SHIPPED[name][0]}-sinks" in {SHIPPED[other][0] for other in SUNK})
"""Those without sinks of the architectures that have models with sinks."""
