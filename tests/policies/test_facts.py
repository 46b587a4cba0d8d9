"""One table has the facts of the policies; the registry, the option types, pages and the citation say the same."""

import re
from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import yaml

import kvpatch
from kvpatch.policies import POLICIES, presets
from kvpatch.policies.facts import COMBINATIONS, COMMON, FACTS, PAPERS
from kvpatch.policies.options import PolicyOptions

ROOT = Path(__file__).parents[2]
ADDRESS = r"https://(?:arxiv\.org/abs|openreview\.net)/[^)\s}]+"


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
    assert COMBINATIONS.keys() == presets._AROUND.keys()
    base = kvpatch.get_policy("h2o").options()
    for name, added in COMBINATIONS.items():
        assert kvpatch.get_policy(f"{name}(h2o)").options() == base | added, name


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
    rows = {"every policy": COMMON, **COMBINATIONS, **{name: fact.options for name, fact in FACTS.items()}}
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
    said = dict(re.findall(r"^ {8}(\w+): (.+(?:\n {12}.+)*)", PolicyOptions.__doc__, re.MULTILINE))
    assert said.keys() == PolicyOptions.__annotations__.keys()
    own = COMBINATIONS | {name: fact.list_options() for name, fact in FACTS.items()}
    named = {
        option: words.split(" and ") for option, text in said.items() for words in re.findall("; with ([^,]+),", text)
    }
    assert named.keys() == {"window", "chunk", "alpha"}
    assert all(option in own[name] for option, names in named.items() for name in names)


# ---- pages ----


def _address(link: str) -> str:
    return link.removeprefix("https://arxiv.org/abs/")


def _linked(section: str) -> dict[str, str]:
    """Titles by address of the papers that a page links."""
    return {_address(link): title for title, link in re.findall(rf"\[([^\]]+)\]\(({ADDRESS})\)", section)}


def _entries(section: str) -> dict[str, tuple[str, str]]:
    """BibTeX keys and titles by address of the papers that a page has entries of."""
    found = {}
    for key, body in re.findall(r"@\w+\{(\w+),(.*?)\n\}", section, re.DOTALL):
        address = re.search(r"(?:eprint += \{|arXiv:|url +=.*?\{)([^\s}]+)\}", body)[1]
        found[address] = key, re.sub("[{}]", "", re.search(r"title += (.*),", body)[1])
    return found


def test_the_page_of_a_policy_cites_the_paper_of_its_row_first_and_every_paper_by_its_title_and_key():
    known = {paper.address: paper for paper in PAPERS.values()}
    for name, fact in FACTS.items():
        section = (ROOT / f"docs/policies/{name}.md").read_text(encoding="utf-8").partition("\n## Paper")[2]
        linked, entries = _linked(section), _entries(section)
        assert [*linked] == [*entries] and [*linked][:1] == ([fact.address] if fact.paper else []), name
        for address, (key, title) in entries.items():
            assert linked[address] == title, f"{name}: {title}"
            if address in known:
                assert (key, title) == (known[address].key, known[address].title), name


def test_the_readme_and_the_citation_name_the_papers_of_the_table():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    for text in (readme, citation["abstract"]):
        assert re.findall(r"(\d+) papers", text) == [str(len(PAPERS))]
    assert _linked(readme) == {paper.address: paper.name for paper in PAPERS.values()}
    assert {one["url"]: one["title"] for one in citation["references"]} == {
        one.link: one.title for one in PAPERS.values()
    }
    assert all(one["authors"] and one["year"] for one in citation["references"])
