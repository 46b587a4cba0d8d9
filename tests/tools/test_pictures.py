"""The pictures of docs/small-models.md: one look per policy, drawn from the means that the page shows, against what is held."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from kvpatch import plotting
from kvpatch.policies.facts import FACTS
from tools.evaluation import observe, overview, page, pictures, plots
from tools.evaluation.page import LATER, SECTIONS
from tools.evaluation.pictures import Panel
from tools.evaluation.table import Table
from tools.evaluation.tasks import get_task

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "small-models.md").read_text(encoding="utf-8")
STORED = pictures.read(DOCS / "results/means.jsonl")


def test_every_policy_has_a_colour_of_its_own():
    colours = {fact.colour for fact in FACTS.values()}
    assert len(colours) == len(FACTS) and all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours)
    assert plotting.style("mine") == plotting.style("mine") and plotting.style("mine")[0] not in colours


def test_every_picture_draws_a_policy_in_the_colour_of_its_row(monkeypatch):
    monkeypatch.setitem(FACTS, "window", replace(FACTS["window"], colour="#123456", marker="d"))
    figures = [plotting.divergence({"window": [(9, 0.1)]}, "random", 10, 0.1, "title")]
    for module in (plots, overview, observe):
        monkeypatch.setattr(module, "save", lambda figure, _: figures.append(figure))
    plots.draw(STORED["recall"], get_task("recall"), "title", "k", None)
    overview.draw(STORED, None)
    observe.plot({"window": [(1, 0.2)]}, None, "title", "across", "up")
    drawn = [{(line.get_color(), line.get_marker()) for axes in figure.axes for line in axes.lines} for figure in figures]
    assert len(drawn) == 4 and all(("#123456", "d") in looks for looks in drawn)


def test_what_is_held_when_the_last_answer_is_due():
    panel = Panel("words", {}, ((100, 20),))
    assert panel.held("snapkv", 0.5, "prompt") == pytest.approx(70 / 120)  # the question and answers are kept
    assert panel.held("h2o", 0.5, "both") == pytest.approx(50 / 120)
    assert panel.held("h2o", 5, "decode") == pytest.approx(105 / 120)
    assert panel.held("full", 1.0, "both") == 1.0
    assert Panel("words").held("h2o", 0.3, "both") == 0.3


def test_every_ranked_section_has_a_picture_of_its_parts():
    for section in SECTIONS:
        if section.ranked:
            panels = pictures.PICTURES[section.task].panels
            assert [panel.part for panel in panels] == list(section.parts), section.task
            assert {one.panel for one in STORED[section.task]} == {panel.title for panel in panels}


def test_pictures_show_the_means_of_the_page():
    for task, every in STORED.items():
        for one in every:
            if one.name != plots.CHANCE:
                assert f"{one.mean:.3f} [{one.low:.3f}, {one.high:.3f}]" in PAGE, (task, one)


def test_the_page_opens_with_what_a_reader_came_for():
    assert PAGE.startswith("# What small models show\n\n" + overview.first_screen(STORED))
    assert PAGE.index("## What the papers say") < min(PAGE.index(f"## {one.title}\n") for one in (LATER, *SECTIONS))
    assert (DOCS / "results" / overview.FILE).is_file()


def test_the_first_figure_names_the_best_policies_and_no_variant_twice():
    for use in overview.USES:
        found = overview.lines_of(use, STORED)
        chosen = overview.named(found)
        assert chosen[-2:] == list(overview.REFERENCES)
        worst = min(overview._mean(found[name]) for name in chosen[:-2])
        others = {name for name in found if name not in chosen and name != plots.FULL and not name.startswith("critical_")}
        assert all(overview._mean(found[name]) <= worst for name in others)
        assert all(len({one.name for one in points}) == 1 for points in found.values())
    assert overview.lines_of(overview.USES[1], STORED)["kvzip"][0].name == "kvzip, chunk 32, floor 0.2"
    assert {one.name for one in overview.lines_of(overview.USES[3], STORED)["roco"]} == {"roco, every token"}


def test_names_in_the_first_figure_do_not_overlap(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(overview, "save", lambda figure, path: drawn.append(figure))
    overview.draw(STORED, tmp_path / "x.png")
    drawn[0].canvas.draw()
    width, height = drawn[0].canvas.get_width_height()
    for axes in drawn[0].axes:
        boxes = [text.get_window_extent() for text in axes.texts if text.get_text() in FACTS]
        assert len(boxes) == overview.BEST + len(overview.REFERENCES)
        for i, box in enumerate(boxes):
            assert 0 <= box.x0 and box.x1 <= width and 0 <= box.y0 and box.y1 <= height
            assert not any(box.overlaps(other) for other in boxes[:i])


def test_a_first_screen_takes_the_place_of_another(tmp_path):
    (tmp_path / "small-models.md").write_text("# What small models show\n\nold\n\nMade by `make small-models` and so on\n")
    page.open_with(STORED, tmp_path)
    text = (tmp_path / "small-models.md").read_text()
    assert text == f"# What small models show\n\n{overview.first_screen(STORED)}\nMade by `make small-models` and so on\n"


def test_labels_are_whole(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure))
    pictures.draw(STORED, tmp_path)
    assert len(drawn) == sum(pictures.PICTURES[task].own for task in STORED)
    for figure in drawn:
        figure.canvas.draw()
        width, height = figure.canvas.get_width_height()
        for axes in figure.axes:
            for text in (axes.xaxis.label, axes.yaxis.label, axes.title, axes._left_title, *figure.texts):
                box = text.get_window_extent()
                assert box.x0 >= -1 and box.x1 <= width + 1 and box.y0 >= -1 and box.y1 <= height + 1, text.get_text()


def test_words_of_a_task_stand_on_the_axis(tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(plots, "save", lambda figure, path: found.append(figure.axes[0].get_ylabel()))
    pictures.draw({"recall": STORED["recall"]}, tmp_path)
    assert get_task("recall").metrics["right"] in " ".join(found[0].split())


def test_the_whole_page_is_written_from_lines_and_gives_the_same_means(tmp_path, monkeypatch):
    """Lines with the stored means, of every task that a picture is drawn of."""
    for module in (plots, overview):
        monkeypatch.setattr(module, "save", lambda figure, path: path.write_bytes(b""))
    tables = {}
    for task, every in STORED.items():
        parts = {panel.title: panel.part for panel in pictures.PICTURES[task].panels}
        metrics, lines = get_task(task).metrics, []
        monkeypatch.setattr(type(get_task(task)), "pictures", lambda self, table, out: None)
        for one in every:
            if one.name != plots.CHANCE:
                values = dict.fromkeys(metrics, 0.5) | {"held": one.x} | {get_task(task).metric: one.mean}
                line = {"name": one.name, "k": one.k, "recipe": "llama", "model": "llama-0", "seed": 0, "sample": one.panel}
                versions = {"kvpatch": "1"}
                lines.append(line | {"group": parts[one.panel], "metrics": values, "versions": versions})
        tables[task] = Table(lines)
    page.write(tables, tmp_path)
    found = pictures.read(tmp_path / "results/means.jsonl")
    assert set(found) == set(STORED)
    for task, every in STORED.items():
        points = {(one.panel, one.name, one.k): one for one in found[task]}
        assert len(points) == len(every), task
        for one in every:
            again = points[one.panel, one.name, one.k]
            assert (again.x, again.mean) == pytest.approx((one.x, one.mean), abs=1e-4), (task, one)
    text = (tmp_path / "small-models.md").read_text()
    assert overview.first_screen(STORED) in text and "Versions: kvpatch 1." in text
    assert all(f"## {section.title}\n" in text for section in SECTIONS if section.task in STORED)


ROWS = {
    "the question is in the prompt": "the question is in the prompt",
    "questions come after it": "questions come after the prompt",
    "the text is a stream, questions come after it": "the context is read in blocks, questions follow",
}
"""Lines of the policies' pages, and the panels of recall that they are from."""


def test_the_pages_of_policies_say_what_the_results_say():
    checked = 0
    for path in sorted((DOCS / "policies").glob("*.md")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row, *said = [cell.strip() for cell in line.strip("|").split("|")]
            if row in ROWS and len(said) == 3:
                panel = [p for p in STORED["recall"] if (p.panel, p.name) == (ROWS[row], path.stem)]
                for point, share in zip(sorted(panel, key=lambda point: point.k), said, strict=True):
                    digits = len(share.partition(".")[2].rstrip("%"))
                    assert share == f"{100 * point.mean:.{digits}f}%", (path.name, row, point.k)
                    checked += 1
    assert checked > 60
