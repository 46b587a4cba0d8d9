"""docs/architectures.md: every type of transformers stands there, with what kvpatch makes of it now."""

import re

import pytest
import transformers
from packaging.version import Version

from tests.helpers.marks import slow_but
from tools.architectures import AUTOMATIC, CAUSAL, GIVEN, IMAGE, PAGE, ROW, UNBUILT, Verdict, judge, page

TEXT = PAGE.read_text(encoding="utf-8")
MADE_WITH = re.search(r"with transformers (\S+)\.", TEXT)[1]
installed = Version(transformers.__version__)


def listed(text):
    """Return the types of a page, and the heading or row that each stands under."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `"):
            found[cells[0].strip("`")] = cells[-1]
        elif line.startswith("| ") and len(cells) == 2:
            found |= dict.fromkeys(re.findall(r"`([^`]+)`", cells[1]), cells[0])
    return found


@pytest.mark.skipif(installed < Version(MADE_WITH), reason="the page is of a later transformers")
def test_every_type_of_transformers_is_listed():
    missing = {*CAUSAL, *IMAGE} - listed(TEXT).keys()
    assert not missing, f"new types: python -m tools.architectures --write judges {', '.join(sorted(missing))}"


def test_the_counts_are_those_of_the_tables():
    sections = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]
    assert len(sections) == 2
    for section in sections:
        served, total = map(int, re.search(r"(\d+) of (\d+) types are served", section).groups())
        assert len(listed(section)) == total
        assert sum(by == "automatic row" or by.startswith("row ") for by in listed(section).values()) == served


SAMPLE = ("llama", "bert", "mamba", "deepseek_v3", "llama4", "qwen2_vl")


@pytest.mark.skipif(installed != Version(MADE_WITH), reason="the page is of another transformers")
@pytest.mark.parametrize("kind", slow_but(SAMPLE[:3], SAMPLE))
def test_a_type_is_what_the_page_says(kind):
    found = judge(kind)
    row = {ROW: f"row `{found.detail}`", AUTOMATIC: "automatic row", UNBUILT: found.detail}
    assert listed(TEXT)[kind] == row.get(found.by, found.by)


def test_what_is_given_is_of_a_type():
    assert installed < Version(MADE_WITH) or GIVEN.keys() <= {*CAUSAL, *IMAGE}


def test_a_page_lists_what_it_was_given():
    told = [
        Verdict("llama", "LlamaForCausalLM", ROW, "llama"),
        Verdict("cwm", "CwmForCausalLM", AUTOMATIC, "cwm"),
        Verdict("mamba", "MambaForCausalLM", "a recurrent state and no keys and values", "MambaForCausalLM keeps a state"),
        Verdict("dbrx", "DbrxForCausalLM", UNBUILT, "AttributeError: no rope_theta"),
    ]
    made = page(told)
    assert "2 of 4 types are served." in made and "0 of 0 types are served." in made
    assert listed(made) == {
        "llama": "row `llama`", "cwm": "automatic row", "mamba": told[2].by, "dbrx": "AttributeError: no rope_theta",
    }  # fmt: skip
