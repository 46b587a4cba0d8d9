"""Writes the README's tables of policies and architectures from the registries: `python -m tools.readme_tables`."""

from __future__ import annotations

from pathlib import Path

from kvpatch.cli.tables import ARCHITECTURE_COLUMNS, POLICY_COLUMNS, architecture_rows, policy_rows

README = Path(__file__).parents[1] / "README.md"
_CODE = ("policy", "architecture", "options")  # columns that are set as code


def markdown(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Format a Markdown table."""

    def cell(column: str, text: str) -> str:
        return f"`{text}`" if text and column in _CODE else text

    lines = [columns, ("---",) * len(columns)]
    lines += [tuple(cell(column, text) for column, text in zip(columns, row, strict=True)) for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def refresh(text: str) -> str:
    """Replace the two tables in the README's `text`, which stand between `<!-- name -->` and `<!-- /name -->`."""
    tables = {
        "policies": markdown(POLICY_COLUMNS, policy_rows()),
        "architectures": markdown(ARCHITECTURE_COLUMNS, architecture_rows()),
    }
    for name, table in tables.items():
        start, stop = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(stop)
        text = f"{before}{start}\n{table}\n{stop}{after}"
    return text


if __name__ == "__main__":
    README.write_text(refresh(README.read_text(encoding="utf-8")), encoding="utf-8")
