"""The project's own pages say what is true of the repository: its version, its papers, its commands, its files."""

import re
from pathlib import Path

import pytest
import yaml

import kvpatch
from kvpatch.policies.facts import PAPERS

ROOT = Path(__file__).parents[1]
PAGES = ("CONTRIBUTING.md", "SECURITY.md")


def test_the_citation_is_of_this_version_and_names_every_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == kvpatch.__version__
    assert citation["license"] == "Apache-2.0"
    assert citation["authors"] == [{"name": "The kvpatch authors"}]
    assert f"of {len(PAPERS)} papers" in citation["abstract"]
    assert {one["url"]: one["title"] for one in citation["references"]} == {one.link: one.title for one in PAPERS.values()}
    assert all(one["authors"] and one["year"] for one in citation["references"])


def test_the_licence_names_its_holder():
    text = (ROOT / "LICENSE").read_text()
    assert text.lstrip().startswith("Apache License")
    assert re.search(r"Copyright 20\d\d The kvpatch authors", text)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_commands_and_files_that_are_there(page):
    text = (ROOT / page).read_text()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z][\w-]*)", text)) <= targets
    for name in re.findall(r"`((?:kvpatch|tests|tools|docs|examples)/[\w/.-]*)", text):
        assert (ROOT / name).exists(), name
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / link).exists(), link
