"""The figures of both servers: the guides name each with what it counts, and their panels name no other."""

import re
from pathlib import Path

import pytest

from kvpatch.cli import metrics as server
from kvpatch.serving.vllm import figures as plugin

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
SERVER = {f"kvpatch_{name}": kind for name, kind, _ in server.ROWS}
PLUGIN = {f"kvpatch_{name}" + "_total" * (kind == "counter"): kind for name, (kind, _) in plugin.ROWS.items()}


@pytest.mark.parametrize(("page", "end", "rows"), [("serving.md", "\n### ", SERVER), ("vllm.md", "\n## ", PLUGIN)])
def test_the_guide_names_every_figure(page, end, rows):
    section = (GUIDES / page).read_text().partition("# Figures\n")[2].partition(end)[0]
    table = dict(re.findall(r"^\| `(kvpatch_\w+)` \| (\w+): ", section, re.MULTILINE))
    assert table == rows, page
    panels = section.partition("```text\n")[2].partition("```")[0]
    used = set(re.findall(r"kvpatch_\w+", panels))
    assert used and used <= set(rows), f"{page}: panels name {used - set(rows)}, which no server has"
    assert not re.findall(r"rate\((?!kvpatch_\w+_total\[)", panels), f"{page}: a rate of no counter"
