"""Evidence on a pretrained language model: which policy loses least, for which use, at equal bytes.

    samples.py      a sample: a prompt, and probes that are read after it
    texts.py        the texts: prose and source code that no published model was trained on
    tasks/          a file per use: what its prompts say and what its probes ask
    settings.py     policies with options, each a row with a label; the nulls
    measure.py      one sample under all settings; the prompt's products are computed once
    runs.py         lines of JSON, resumed where a run stopped
    statistics.py   means, intervals and p-values over samples; tables.py: how they are written
    page.py         tables of the lines; claims.py: what papers say; picture.py; report.py: docs/results.md
    chooser.py      what the guides and the policies' pages say of the lines
    agents.py       what it costs to drop a tool result; grpo_table.py: the table of docs/guides/train.md
    small/          mechanisms, on models that this repository trained: docs/small-models.md

`python -m tools.evidence --help` runs a task, `make results` all of them and the page.
"""
