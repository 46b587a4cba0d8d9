"""Random schedules of arrivals and cancellations; `python -m tools.reliability.engines` runs 200 of them."""

import pytest

from tests.helpers.schedules import Schedules
from tests.helpers.tiny import make


@pytest.mark.slow
def test_no_schedule_changes_a_token():
    schedules = Schedules(make("llama_gqa"))
    assert [line for seed in range(12) for line in schedules.run(seed)] == []
    assert schedules.cancelled > 12 and schedules.compared > 40
