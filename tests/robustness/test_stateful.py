"""Random sequences of everything that can be done to a patched model and its caches, beside an oracle (stateful.py)."""

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.helpers.marks import slow_but
from tests.robustness.stateful import Machine
from tests.robustness.stateful_faults import HOPS, name_of

PIECES, EACH = 6, 250
CHOSEN = settings(max_examples=EACH, stateful_step_count=5, suppress_health_check=list(HealthCheck), database=None)


def test_functions_that_throw_exist():
    """A sequence meets few of them, so one that was renamed would show only in the slow pieces."""
    assert [name_of(hop) for hop in HOPS if hop[1] not in vars(hop[0])] == []


@pytest.mark.parametrize("piece", slow_but((0,), range(PIECES)))
def test_any_sequence(piece):
    """The same sequences everywhere; `python -m tools.reliability.soak` draws new ones."""
    run_state_machine_as_test(seed(piece)(type("Piece", (Machine,), {})), settings=CHOSEN)
