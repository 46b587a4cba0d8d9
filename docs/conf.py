"""Sphinx configuration of the documentation: `make docs` builds docs/_build/html and fails on any warning."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import kvpatch

project = "kvpatch"
author = "the kvpatch authors"
copyright = "the kvpatch authors"
release = version = kvpatch.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4

# Docstrings are written for a reader of the source: `name` is code, not a link, and types may be described in words.
default_role = "literal"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_include_init_with_doc = False
napoleon_use_ivar = True
napoleon_use_rtype = False
python_display_short_literal_types = True

html_theme = "furo"
html_title = f"kvpatch {version}"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
copybutton_prompt_text = r">>> |\$ "
copybutton_prompt_is_regexp = True


_EXAMPLE = re.compile(r"^Examples?:$")


def _prepare(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Turn `Example:` sections into code blocks, and escape what a plain sentence may hold and reStructuredText may not."""
    found: list[str] = []
    example = False
    for line in lines:
        if _EXAMPLE.match(line):
            example = True
            found += [".. rubric:: Example", "", ".. code-block:: python", ""]
        elif example and (not line.strip() or line.startswith(" ")):
            found.append(line)
        else:
            example = False
            found.append(_escape(line))
    lines[:] = found


def _escape(line: str) -> str:
    """Escape bars and trailing underscores outside `code`."""
    parts = line.split("`")
    parts[::2] = [re.sub(r"_(?=\W|$)", r"\\_", part.replace("|", r"\|")) for part in parts[::2]]
    return "`".join(parts)


def setup(app: object) -> None:
    """Register the hook that prepares docstrings; it runs before napoleon's."""
    app.connect("autodoc-process-docstring", _prepare, priority=100)  # type: ignore[attr-defined]
