"""docs/reliability.md: a command writes its own section and leaves the others alone."""

import re

import pytest

from tools.reliability.page import PAGE, SECTIONS, in_short, put, sections


def test_a_section_is_replaced_in_its_place(tmp_path):
    page = tmp_path / "docs" / "page.md"
    put("## Memory\n\nflat\n", page)
    put("## Soak\n\nclean\n\n### Faults\n\nmany\n", page)
    put("## Memory\n\nflatter\n", page)
    assert sections(page.read_text()) == {"Soak": "clean\n\n### Faults\n\nmany", "Memory": "flatter"}
    assert "- [Soak](#soak): (`make soak`)\n- [Memory](#memory): (`python" in page.read_text()
    with pytest.raises(ValueError, match="Speed"):
        put("## Speed\n\nfast\n", page)


def test_the_page_in_docs_has_every_section_and_its_picture():
    text = PAGE.read_text()
    assert list(sections(text)) == list(SECTIONS)
    for picture in re.findall(r"!\[.*\]\((.*)\)", text):
        assert (PAGE.parent / picture).is_file()


def test_the_page_opens_with_what_a_reader_came_for():
    text = PAGE.read_text()
    first = in_short(sections(text))
    assert len(first) == len(SECTIONS)
    assert all("**" in line for line in first)  # its figures were found
    assert "\n".join(first) in text.split("\n## ")[0]
