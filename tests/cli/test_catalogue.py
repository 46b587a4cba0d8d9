"""The names and choices that the quick commands know are those of the registries."""

import re

import pytest

import kvpatch
from kvpatch.backends.dispatch import check_name
from kvpatch.cli import catalogue
from kvpatch.errors import KVPatchError
from kvpatch.planning.known_models import ARCHITECTURES
from kvpatch.policies.naming import POSITIONS, check_policy


def test_architectures_are_those_of_the_registry():
    assert tuple(ARCHITECTURES) == kvpatch.list_architectures(), "add the new ones, with models that people know"
    assert all(ARCHITECTURES.values())


def test_choices_are_the_library_s():
    for backend in catalogue.BACKENDS:
        check_name(backend)
    for positions in POSITIONS:
        with pytest.raises(KVPatchError, match="model"):
            kvpatch.patch(None, "h2o", positions=positions)


@pytest.mark.parametrize("name", ["h2o", "SnapKV", "Ada-KV", "critical(adaptive(roco))", " pyramid(h2o) "])
def test_names_that_are_known(name):
    check_policy(name)


def test_options_that_a_combination_adds_are_known():
    check_policy("critical(adaptive(roco))", {"alpha": 0.3, "floor": 0.1, "recent": 5})


def test_what_is_refused():
    for name, options, words in (
        ("h20", {}, "Unknown policy 'h20'. Did you mean 'h2o'?"),
        ("SNAPVK", {}, "Did you mean 'snapkv'?"),
        ("critical(h20)", {}, "Did you mean 'h2o'?"),
        ("h2o", {"recnt": 1}, "Policy 'h2o' has no option 'recnt'. Did you mean 'recent'?"),
    ):
        with pytest.raises(KVPatchError, match=re.escape(words)):
            check_policy(name, options)


def test_a_registered_policy_is_known_to_the_command_line():
    kvpatch.register_policy("of_a_user", kvpatch.get_policy("h2o"))
    try:
        check_policy("of_a_user", {"recent": 3})
    finally:
        kvpatch.unregister_policy("of_a_user")
    with pytest.raises(KVPatchError, match="Unknown policy 'of_a_user'"):
        check_policy("of_a_user")
