"""CacheSettings: which layers evict, by which policy, and how many tokens each may keep."""

import pytest

import kvpatch
from kvpatch.cache.settings import CacheSettings
from kvpatch.policies import get_policy
from kvpatch.policies.budgets import Budget
from tests.helpers.running import N
from tests.helpers.tiny import make

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture(scope="module")
def model():
    return make("llama_gqa")


def test_layers_that_bound_themselves_always_act():
    """Their sliding window evicts, whatever the policy of the others does."""
    for name, acting in (("h2o", [True, True]), ("full", [False, True])):
        cache = kvpatch.EvictingCache(CacheSettings(get_policy(name), Budget((0.5, 0.5)), bounds=(None, 4)))
        assert list(cache.settings.evicts) == acting
        assert [policy.name for policy in cache.settings.policies] == [name, "window"]


@pytest.mark.parametrize(("schedule", "most"), [("prompt", N), ("both", N), ("decode", 2 * N)])
def test_a_pyramid_gives_no_layer_more_than_its_prompt(model, schedule, most):
    """Unless tokens are to come that may fill it."""
    with kvpatch.patched(model, "pyramid(h2o)", 0.9, schedule=schedule) as handle:
        cache = handle.new_cache()
    shares = [cache.settings.tokens(layer, N) for layer in range(2)]
    assert sum(shares) == 2 * int(0.9 * N)
    assert (shares[0] > N) == (schedule == "decode")
    assert shares[0] <= most


def test_a_model_that_exits_early_has_the_settings_of_its_first_layers():
    settings = CacheSettings(get_policy("h2o"), Budget((0.5, 0.25, 1.0)), bounds=(None, 4, None))
    assert settings.first_layers(None) is settings.first_layers(3) is settings.first_layers(5) is settings
    early = settings.first_layers(2)
    assert (early.n_layers, early.budget.per_layer, early.bounds) == (2, (0.5, 0.25), (None, 4))
