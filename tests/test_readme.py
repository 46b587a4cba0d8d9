"""The README's tables are the registries', and its code runs."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Jais2Config, Jais2ForCausalLM

import kvpatch
from kvpatch.arch.adapter import REGISTRY
from kvpatch.evaluation.check import Checks
from kvpatch.policies import POLICIES
from kvpatch.policies.statistics import STATISTICS
from tests.helpers import tiny
from tools import readme_tables

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def names(monkeypatch, tmp_path):
    """What the examples take as given; registries and the working folder are restored afterwards."""
    before = dict(POLICIES), dict(REGISTRY), dict(STATISTICS)
    monkeypatch.chdir(tmp_path)
    ids = tiny.prompt(1, 24)
    yield {
        "kvpatch": kvpatch,
        "torch": torch,
        "model": tiny.make("llama"),
        "inputs": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        "context_ids": ids,
        "questions": [tiny.prompt(1, 3, seed=seed) for seed in (5, 6)],
    }
    for registry, old in zip((POLICIES, REGISTRY, STATISTICS), before, strict=True):
        registry.clear()
        registry.update(old)


def test_tables_are_the_registries():
    assert readme_tables.refresh(README) == README, "run python -m tools.readme_tables"


def test_a_new_policy_would_show(names):
    assert "`every_other` |" not in readme_tables.refresh(README)
    kvpatch.register_policy("every_other", kvpatch.get_policy("h2o").with_options(recent=7))
    row = next(line for line in readme_tables.refresh(README).splitlines() if "`every_other` |" in line)
    assert row == "| `every_other` | accumulated | the newest 7 | `recent=7` | both | H2O |"


@pytest.mark.parametrize("number", range(len(CODE)))
def test_code_runs(names, number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = CODE[number].replace("max_new_tokens=256", "max_new_tokens=4")
    code = code.replace("fullgraph=True)", 'fullgraph=True, backend="eager")')  # inductor takes half a minute
    exec(compile(code, f"README.md, block {number + 1}", "exec"), names)


def _block(text):
    return next(code for code in CODE if text in code)


def test_holding_a_cache_asks_each_question_of_the_same_context(names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answers = []
    code = _block("new_cache()").replace("answer = ", "answers += [past.get_seq_length()]; answer = ")
    exec(code, names | {"answers": answers})
    assert answers == [24, 24]


def test_the_policy_of_the_example_keeps_even_positions(names):
    exec(_block("register_policy"), names)
    with kvpatch.patched(names["model"], "every_other", k=0.5), torch.no_grad():
        cache = names["model"](names["context_ids"]).past_key_values
    # of 24 tokens 12: 4 first, 3 newest, and the 5 newest even ones between; and the free slot
    assert sorted(cache.positions(0)[0, 0].tolist()) == [-1, 0, 1, 2, 3, 12, 14, 16, 18, 20, 21, 22, 23]


def test_the_adapter_of_the_example_is_right(names):
    config = Jais2Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    model = Jais2ForCausalLM(config).eval()
    with pytest.raises(kvpatch.KVPatchError, match="No adapter for Jais2ForCausalLM.*register a row") as error:
        Checks(model)
    recipe = "kvpatch.InterfaceAdapter('jais2', 'transformers.models.jais2.modeling_jais2.Jais2Attention')"
    assert f"kvpatch.register_arch({recipe})" in str(error.value)
    exec(_block("register_arch"), names)
    assert [result for result in Checks(model).run() if not result.passed] == []


def test_what_is_named_is_there_after_a_plain_import():
    names = sorted(set(re.findall(r"`(kvpatch\.[A-Za-z_][\w.]*)", README)))
    assert "kvpatch.check_model" in names
    code = f"import kvpatch\nfor name in {names!r}: eval(name)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr


def test_links_and_tree():
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / link).is_file(), link
    tree = README.split("## Where things are")[1].split("```")[1]
    for line in tree.splitlines():
        if line.startswith("  ") and line.strip():
            assert (ROOT / "kvpatch" / line.split()[0]).exists(), line
    for module in (ROOT / "kvpatch").glob("*.py"):
        assert module.name.startswith("__") or module.name in tree, f"{module.name} is not in the README's tree"


def test_only_true_commands():
    prose = re.sub(r"```python.*?```|<!-- refused -->.*<!-- /refused -->", "", README, flags=re.DOTALL)
    for command in re.findall(r"`?kvpatch (\w+) ?", prose):
        assert command in {"demo", "check", "compare", "generate", "policies", "architectures", "keeps", "says"}, command


def _rows(name):
    table = README.split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0].strip().splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[2:]]


def test_what_works_has_a_test_and_every_example_is_named():
    named = set()
    for what, example, test in _rows("works"):
        if not test.strip("` "):
            assert what.startswith("**"), what
            continue
        file, function = test.strip("` ").split("::")
        assert f"def {function}(" in (ROOT / "tests" / file).read_text(), test
        named |= set(re.findall(r"\[(\w+)\]", example))
    parts = {"__init__", "finetune_table"}  # not run by themselves
    assert named == {path.stem for path in (ROOT / "examples").glob("*.py")} - parts


def _words(path):
    """What the file's strings say, with a gap for whatever is filled in."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_what_is_refused_is_said_in_these_words():
    said = [words for path in (ROOT / "kvpatch").rglob("*.py") for words in _words(path)]
    for what, wanted in _rows("refused"):
        for part in wanted.split(" ... "):
            assert any(part in words for words in said), f"{what}: {part}"
