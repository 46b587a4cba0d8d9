import resource
import sys

import pytest

from tools.frames import roomy


def faults(depth):
    """Page faults of 2,000 calls, from `depth` calls further down."""
    if depth:
        return faults(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(2000):
        nested(6)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def nested(calls):
    return nested(calls - 1) if calls else None


@pytest.mark.skipif(sys.platform != "linux", reason="counts page faults as Linux does")
def test_no_depth_maps_memory_at_each_call():
    assert max(roomy(faults)(depth) for depth in range(0, 150, 3)) < 500


def test_arguments_and_results_pass_and_the_name_stays():
    assert roomy(sorted)([2, 1], reverse=True) == [2, 1]
    assert roomy(faults).__name__ == "faults"
