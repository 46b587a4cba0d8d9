"""One table has the facts of the policies; the registry and the types of options say the same."""

import inspect
import re
from collections.abc import Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

import kvpatch
from kvpatch.policies import POLICIES
from kvpatch.policies.facts import COMBINATIONS, COMMON, FACTS, PAPERS
from kvpatch.policies.naming import find_division
from kvpatch.policies.options import PolicyOptions


def test_every_policy_and_every_paper_has_a_row():
    assert tuple(FACTS) == kvpatch.list_policies()
    assert {fact.paper for fact in FACTS.values()} == {"", *PAPERS}
    keys, addresses = zip(*((paper.key, paper.address) for paper in PAPERS.values()), strict=True)
    assert len(set(keys)) == len(set(addresses)) == len(PAPERS)


def test_a_row_has_the_schedule_the_options_and_the_defaults_of_its_policy():
    for name, policy in POLICIES.items():
        fact, options = FACTS[name], policy.options()
        assert (fact.schedule, fact.list_options()) == (policy.schedule, options), name
        assert fact.options == {key: value for key, value in options.items() if COMMON.get(key, ...) != value}, name


def test_a_combination_adds_the_options_of_its_row():
    base = kvpatch.get_policy("h2o").options()
    for name, row in COMBINATIONS.items():
        assert kvpatch.get_policy(f"{name}(h2o)").options() == {**base, **row.options}, name


COMBINED = (
    *(f"{name}(h2o)" for name in COMBINATIONS),
    "pyramid(r_kv)",
    "critical(adaptive(roco))",
    "pyramid(cur)",
    "refit(kvzip)",
)


@pytest.mark.parametrize("name", [*FACTS, *COMBINED, "chunked(pyramid(h2o))", "Ada-KV"])
def test_a_budget_is_divided_as_the_policy_divides_it(name):
    policy = kvpatch.get_policy(name)
    shared = "" if policy.over_heads is None else "model" if policy.over_model else "layer"
    beta = None if policy.over_layers is None else policy.over_layers.beta
    schedule = policy.schedule if policy.evicts else None
    assert find_division(name, None, {}) == (schedule, policy.every, beta, policy.needs.protects, shared)


def test_a_schedule_and_options_stand_in_for_the_policy_s_own():
    assert find_division("pyramid(h2o)", "prompt", {"beta": 7, "every": 3}) == ("prompt", 3, 7, 0, "")
    assert find_division("pyramidkv", None, {"window": 5}).protects == 5


def test_a_policy_s_source_begins_with_its_paper():
    for name, policy in POLICIES.items():
        source, paper = (text.casefold().replace("-", " ") for text in (policy.source, FACTS[name].paper))
        assert source.startswith(paper) and (paper or source.startswith("the baseline")), name


# ---- types of options ----


def _fits(value: object, kind: Any) -> bool:
    """Tell whether a value is of an annotated type of PolicyOptions."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (UnionType, Union):
        return any(_fits(value, one) for one in args)
    if origin is Literal:
        return value in args
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(args) and all(map(_fits, value, args))
    if origin is Sequence:
        return isinstance(value, tuple | list) and all(_fits(one, args[0]) for one in value)
    return kind is Any or type(value) is kind


def test_every_option_of_a_row_has_a_type_that_its_default_fits():
    hints = get_type_hints(PolicyOptions)
    rows = {
        "every policy": COMMON,
        **{name: row.options for name, row in COMBINATIONS.items()},
        **{name: fact.options for name, fact in FACTS.items()},
    }
    assert hints.keys() == {option for options in rows.values() for option in options}
    for name, options in rows.items():
        for option, default in options.items():
            assert _fits(default, hints[option]), f"{name}: {option}={default!r}"


@pytest.mark.parametrize(
    ("value", "kind"),
    [("1", int | float), (True, int), ("min", Literal["max"]), ((1.0,), tuple[float, float]), (("a",), Sequence[int])],
)
def test_a_default_of_another_type_is_seen(value, kind):
    assert not _fits(value, kind)


def test_the_words_about_an_option_name_policies_that_have_it():
    said = dict(re.findall(r"^    (\w+): [^#\n]+  # (.+)$", inspect.getsource(PolicyOptions), re.MULTILINE))
    assert said.keys() == PolicyOptions.__annotations__.keys()
    named = {name: words.split(" and ") for name, text in said.items() for words in re.findall("; with ([^,]+),", text)}
    assert named.keys() == {"window", "chunk", "alpha"}
    assert all(option in FACTS[name].options for option, names in named.items() for name in names)
