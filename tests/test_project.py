"""The project's own pages say what is true of the repository: its version, its papers, its commands, its files."""

import re
from pathlib import Path

import pytest
import yaml

import kvpatch
from kvpatch.policies import POLICIES

ROOT = Path(__file__).parents[1]
PAGES = ("CONTRIBUTING.md", "SECURITY.md")
# what a policy's source begins with, and its number on arXiv, or where it is instead
PAPERS = {
    "AdaKV": "2407.11550",
    "ChunkKV": "2502.00299",
    "Compactor": "2507.08143",
    "CriticalKV": "2502.03805",
    "CurDKV": "2509.15038",
    "DefensiveKV": "2510.13334",
    "DropKV": "https://openreview.net/forum?id=MqfNzH3TVH",
    "DuoAttention": "2410.10819",
    "H2O": "2306.14048",
    "KVzip": "2505.23416",
    "KeyDiff": "2504.15364",
    "Keyformer": "2403.09054",
    "L2-norm baseline": "2406.11430",
    "KVzap": "2601.07891",
    "LagKV": "2504.04704",
    "Expected Attention": "2510.00636",
    "LazyEviction": "2506.15969",
    "PyramidKV": "2406.02069",
    "Q-Filters": "2503.02812",
    "R-KV": "2505.24133",
    "RaaS": "2502.11147",
    "RoCo": "2402.06262",
    "ScissorHands": "2305.17118",
    "SnapKV": "2404.14469",
    "StreamingLLM": "2309.17453",
    "TOVA": "2401.06104",
    "TriAttention": "2604.04921",
    "VaSE": "2606.03928",
}


def test_the_citation_is_of_this_version_and_names_every_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == kvpatch.__version__
    assert citation["license"] == "Apache-2.0"
    assert citation["authors"] == [{"name": "The kvpatch authors"}]
    urls = [paper["url"] for paper in citation["references"]]
    assert sorted(urls) == sorted(n if "/" in n else f"https://arxiv.org/abs/{n}" for n in PAPERS.values())
    assert all(paper["title"] and paper["authors"] and paper["year"] for paper in citation["references"])


def test_the_source_of_every_policy_is_cited():
    for name, policy in POLICIES.items():
        assert name == "full" or policy.source.startswith(tuple(PAPERS)), f"{name}: {policy.source}"


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
