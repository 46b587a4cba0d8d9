"""Mechanisms, on models that this repository trained: what only they can show, in minutes and exactly.

    task.py        a sample, a task, and policies with options that fit texts of some two hundred tokens
    together.py    samples that run together, and answers that are fed token by token
    recall.py      the questions that most tasks ask
    later.py, mass.py, reasoning.py    a task each
    runs.py        lines of JSON, resumed where a run stopped
    table.py       the lines' means and differences; page.py: docs/small-models.md

`python -m tools.evidence small` measures, `make small-models` all of it and the page.
"""
