"""The catalogue that the quick commands read says what the registries say."""

import re

import pytest

import kvpatch
from kvpatch.backends.dispatch import check_name
from kvpatch.cli import catalogue
from kvpatch.errors import KVPatchError
from kvpatch.policies import POLICIES
from kvpatch.policies.policy import SCHEDULES


def test_policies_are_those_of_the_registry():
    assert tuple(catalogue.POLICIES) == kvpatch.list_policies()
    for name, policy in POLICIES.items():
        entry, options = catalogue.POLICIES[name], policy.options()
        changed = {key: value for key, value in options.items() if catalogue.COMMON.get(key, ...) != value}
        assert (entry.name, entry.schedule, entry.options) == (name, policy.schedule, changed)
        assert set(options) == {*entry.options, *catalogue.COMMON}
        assert entry.use
        assert not entry.arxiv or re.fullmatch(r"\d{4}\.\d{5}|https://openreview.net/forum\?id=\w+", entry.arxiv)
        assert bool(entry.paper) == bool(entry.arxiv)
        assert entry.paper.casefold() in policy.source.replace("-norm baseline", " norm").casefold() or name in {"random"}, name


def test_architectures_are_those_of_the_registry():
    assert tuple(catalogue.ARCHITECTURES) == kvpatch.list_architectures(), "add the new ones, with models that people know"
    assert all(catalogue.ARCHITECTURES.values())


def test_choices_are_the_library_s():
    assert catalogue.SCHEDULES == SCHEDULES
    for backend in catalogue.BACKENDS:
        check_name(backend)
    for positions in catalogue.POSITIONS:
        with pytest.raises(KVPatchError, match="model"):
            kvpatch.patch(None, "h2o", positions=positions)


@pytest.mark.parametrize("name", ["h2o", "SnapKV", "Ada-KV", "critical(adaptive(roco))", " pyramid(h2o) "])
def test_names_that_are_known(name):
    catalogue.check_policy(name)


def test_what_is_refused():
    for name, options, words in (
        ("h20", {}, "Unknown policy 'h20'. Did you mean 'h2o'?"),
        ("SNAPVK", {}, "Did you mean 'snapkv'?"),
        ("critical(h20)", {}, "Did you mean 'h2o'?"),
        ("h2o", {"recnt": 1}, "Policy 'h2o' has no option 'recnt'. Did you mean 'recent'?"),
    ):
        with pytest.raises(KVPatchError, match=re.escape(words)):
            catalogue.check_policy(name, options)


def test_a_registered_policy_is_known_to_the_command_line():
    kvpatch.register_policy("of_a_user", kvpatch.get_policy("h2o"))
    try:
        catalogue.check_policy("of_a_user", {"recent": 3})
    finally:
        kvpatch.unregister_policy("of_a_user")
    with pytest.raises(KVPatchError, match="Unknown policy 'of_a_user'"):
        catalogue.check_policy("of_a_user")
