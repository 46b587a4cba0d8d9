"""Writes the JSONL files of this folder: python -m examples.lm_eval_tasks.make

recall.jsonl   the recall task of tools/training/tasks.py, for models such as llama-0; contexts of different lengths
names.jsonl    functions of this repository, cut before the last name, for models such as llama-python
source.jsonl   files of this repository
"""

import ast
import json
import random
import re
from pathlib import Path

from tools.training import tasks

FOLDER = Path(__file__).parent
SOURCES = ("blocks", "feeding", "journal", "forward", "attention", "report", "divergence", "slots", "cache", "check")
ROOT = FOLDER.parents[1] / "kvpatch"


def recall(count: int, seed: int = 0) -> list[dict]:
    """Four answers of one context are the choices."""
    rng, words, rows = random.Random(seed), tasks.tokenizer(), []
    for _ in range(count):
        context = rng.randint(32, 64)
        batch = tasks.recall(rng, 1, context=context, keys=6, zipf=0.3, density=0.6, questions=4)
        choices = [words.decode(answer) for answer in batch.answer_BAW[0]]
        right, order = choices[0], rng.sample(choices, 4)
        question = batch.tokens_BT[0, : context + 2]
        rows.append({"text": words.decode(question), "choices": order, "label": order.index(right)})
    return rows


def names(count: int, seed: int = 0) -> list[dict]:
    """The last name of a function's last line, among other names of that function."""
    rng, rows = random.Random(seed), []
    for source in SOURCES:
        text = (ROOT / f"{source}.py").read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef):
                continue
            code = ast.get_source_segment(text, node) or ""
            used = sorted({n.id for n in ast.walk(node) if isinstance(n, ast.Name) and len(n.id) > 2})
            *_, last = re.finditer(r"\b[A-Za-z_]\w{2,}\b", code)
            others = [name for name in used if name != last[0]]
            if 200 < len(code) < 900 and last[0] in code[: last.start()] and len(others) >= 3:
                choices = rng.sample([last[0], *rng.sample(others, 3)], 4)
                rows.append({"text": code[: last.start()], "choices": choices, "label": choices.index(last[0])})
    return rng.sample(rows, min(count, len(rows)))


def main() -> None:
    files = {"recall": recall(56), "names": names(32)}
    files["source"] = [{"text": (ROOT / f"{source}.py").read_text(encoding="utf-8")} for source in SOURCES[:4]]
    for name, rows in files.items():
        (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{name}.jsonl: {len(rows)} rows")


if __name__ == "__main__":
    main()
