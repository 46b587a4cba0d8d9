"""Figures that pages state about the code are counted anew."""

import ast
import inspect
import re
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch

import kvpatch
from kvpatch.attention import bound_step
from kvpatch.backends import protocol, torch_backend
from kvpatch.cli import demo, story
from kvpatch.policies import needs
from kvpatch.policies.context import NewTokens
from kvpatch.policies.facts import PAPERS
from kvpatch.policies.statistics import STATISTICS
from tests import conftest
from tests.helpers.contexts import small_context
from tests.helpers.tiny import make, prompt
from tests.test_layers import HUGGING_FACE, LINES, ROOT, circles, graph, modules
from tools import docs_tables, house

HERE = ROOT.parent
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
WORDS = {word: number for number, word in enumerate(NUMBERS, 1)}


def page(name):
    return " ".join((HERE / name).read_text(encoding="utf-8").split())


def said(name, pattern):
    """The numbers that a page states, in digits or words, where a pattern has its groups."""
    (found,) = re.finditer(pattern, page(name))
    return tuple(WORDS[one] if one in WORDS else int(one) for one in found.groups())


def test_papers_of_the_readme():
    assert said("README.md", r"those of (\d+) papers come along") == (len(PAPERS),)


def test_policies_of_the_demo():
    for name in ("docs/reference/cli.md", "kvpatch/cli/commands.py"):
        assert set(re.findall(r"(\w+) policies on", page(name))) & WORDS.keys() == {"eight"}, name
    assert len(demo.POLICIES) == WORDS["eight"]
    assert len(story.POLICIES) - 2 == WORDS["three"]  # beside the full cache and chance
    for name in ("README.md", "Makefile"):
        assert "what three policies keep" in page(name), name
    assert said("README.md", r"(\d+) words that no model")[0] == round(len(story.TEXT.read_text().split()), -1)


def test_families_and_model_types_of_the_readme():
    """The sentence is written from the registry and the page of architectures."""
    assert said("README.md", r"\[(\d+) families\]") == (len(kvpatch.list_architectures()),)
    assert docs_tables.served("") in (HERE / "README.md").read_text()


def test_tasks_of_a_backend():
    tasks = get_args(protocol.Task)
    assert protocol.TASKS == tasks
    assert said("CONTRIBUTING.md", r"protocol\.py` lists the (\w+) tasks") == (len(tasks),)
    assert said("docs/architecture.md", r"tasks of a backend \| (\d+) \|") == (len(tasks),)
    assert f"There are {NUMBERS[len(tasks) - 1]} tasks." in protocol.__doc__


def test_modules_circles_and_lines():
    assert said("docs/architecture.md", r"modules in the package root \| (\d+) \|") == (len(list(ROOT.glob("*.py"))),)
    assert said("docs/architecture.md", r"import each other in a circle \| (\d+) \|") == (len(circles(graph())),)
    assert said("docs/architecture.md", r"lines of a file, at most, but for those below \| (\d+) \|") == (LINES,)
    assert said("docs/architecture.md", r"A file has at most (\d+) lines") == (LINES,)
    assert said("CONTRIBUTING.md", r"Files have at most (\d+) lines") == (LINES,)


def test_what_a_score_is_made_of():
    kinds = [one for one in map(needs.__dict__.get, needs.__all__) if inspect.isclass(one) and issubclass(one, needs.Need)]
    assert said("docs/architecture.md", r"kinds of needs \| (\d+) \|") == (len(kinds) - 1,)
    assert said("docs/architecture.md", r"run by themselves \| (\d+) \|") == (len(bound_step.Fused.__subclasses__()),)


def test_lengths_of_functions():
    lengths = [
        node.end_lineno - node.lineno + 1
        for path in modules().values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    limit, share = said("docs/architecture.md", r"functions of at most (\d+) lines, at least \| (\d+)% \|")
    assert 100 * sum(length <= limit for length in lengths) / len(lengths) >= share
    assert said("CONTRIBUTING.md", r"functions (\d+) wherever possible") == (limit,)


def test_counts_of_the_code_before_and_now():
    """Counts of single places are exact; a page need not follow each line that is written."""
    text = (HERE / "docs/architecture.md").read_text().partition("| | before | now |\n")[2].partition("\n\n")[0]
    said = {name: now for name, _, now in (line.strip("| ").split(" | ") for line in text.splitlines()[1:])}
    counted = house.count_all()
    assert list(said) == list(counted)
    for name, count in counted.items():
        stated, found = (float(one.replace(",", "")) for one in (said[name], count))
        exact = not re.search("lines|%", name)
        assert abs(stated - found) <= (0 if exact else found / 30), f"{name}: {count}, not {said[name]}"


def test_what_a_gate_and_a_read_of_a_flag_are(tmp_path):
    """The counts see what they count."""
    (tmp_path / "kvpatch/policies").mkdir(parents=True)
    score = "class Score:\n    rows: str\n    def value(self): ...\n    def _own(self): ...\n"
    (tmp_path / "kvpatch/policies/scores.py").write_text(score + "def own(score):\n    return score.rows\n")
    gate = "def refuse(policy, n: Any):\n    if policy.rows == n:\n        raise ValueError  # of the user\n"
    (tmp_path / "kvpatch/gate.py").write_text(gate + "def map_rows(it):\n    return it.policy.needs, it.other.rows\n")
    code = house.Code(tmp_path)
    assert code.list_score_members() == {"rows", "value"}
    assert (code.count_flags_read(), code.count_gates(), code.count_definitions("map_rows")) == (1, 1, 1)
    assert (code.count_lines("kvpatch"), code.share_of_single_words()) == (11, 80)
    assert (code.rate_of_any(), round(code.rate_of_comments())) == (1000 / 11, 9)


def test_where_transformers_is_named():
    _, _, text = page("docs/architecture.md").partition("transformers, accelerate and peft are named in ")
    text = text.split("`from_dynamic.py`.")[0]
    cache = {name.removeprefix("cache.") for name in HUGGING_FACE if name.startswith("cache.")}
    assert set(re.findall(r"`(\w+)\.py`", text)) - {"patching"} | {"from_dynamic"} == cache
    assert WORDS[re.search(r"in (\w+) files of `cache/`", text)[1]] == len(cache)
    others = {name.replace(".", "/") for name in HUGGING_FACE if not name.startswith("cache.")} - {"handle"}
    assert {name.rstrip("/").removesuffix(".py") for name in re.findall(r"`([\w/]+(?:/|\.py))`", text)} >= others


def test_the_one_module_that_takes_the_package_by_its_public_name():
    """An import that test_layers.py cannot place, for it names no module."""
    trees = {name: ast.walk(ast.parse(path.read_text())) for name, path in modules().items()}
    taken = [
        name
        for name, tree in trees.items()
        if any("kvpatch" in [one.name for one in node.names] for node in tree if isinstance(node, ast.Import))
    ]
    assert taken == ["arch.proof"]
    assert "One exception: `arch/proof.py` calls `kvpatch.check_model`" in page("docs/architecture.md")


def test_cases_of_a_test_that_are_fast():
    assert said("CONTRIBUTING.md", r"the fast tests: (\w+) cases of each test") == (conftest.FAST,)


def test_statistics_that_the_guide_names():
    text = page("docs/extend/policy.md").split("Named ones are ")[1].split(". A new one")[0]
    assert set(re.findall(r'"(\w+)"', text)) == set(STATISTICS)


def test_what_a_score_can_need():
    """Every need of the library is in the guide's table, and what is asked for without it names it."""
    text = (HERE / "docs/extend/policy.md").read_text().split("## What else a score can need")[1].split("\n\n")[1]
    lines = [line.strip("| ").split(" | ") for line in text.splitlines()[2:]]
    told = {name for _, wanted, _ in lines for name in re.findall(r"`(\w+)\(.*\)`", wanted)} - {"entry"}
    abstract, keyformers = {"Need", "Needs"}, {"NoisySums"}
    kinds = {name for name in needs.__all__ if inspect.isclass(one := getattr(needs, name)) and issubclass(one, needs.Need)}
    assert told == kinds - abstract - keyformers
    for _, wanted, given in lines:
        for name in re.findall(r"`new\.(\w+)`", given):
            assert name in NewTokens.__annotations__, name
        for name in re.findall(r"context\.view\((\w+)\)", given):
            assert name in wanted
            with pytest.raises(kvpatch.KVPatchError, match=name):
                small_context(1, None).view(getattr(needs, name))
        for state in re.findall(r'context\.state\["(\w+)"\]', given):
            (kind,) = (getattr(needs, name) for name in told if name in wanted)
            assert f'"{state}"' in inspect.getsource(kind), state


def test_a_score_sees_values():
    """The guide once said that it does not."""

    class Long(kvpatch.Score):
        def entry(self, new):
            return {"size": new.v_BHQD.norm(dim=-1)}

        def value(self, context):
            return context.state["size"]

    model, ids = make("llama_gqa"), prompt(1, 20)
    with kvpatch.patched(model, kvpatch.Policy("long", Long()), k=6), torch.no_grad():
        held = model(ids).past_key_values.positions(0)
    with torch.no_grad():
        size = model(ids).past_key_values.layers[0].values.norm(dim=-1)
    assert [sorted(set(head.tolist()) - {-1}) for head in held[0]] == [
        sorted(head.topk(6).indices.tolist()) for head in size[0]
    ]


def test_the_way_of_a_decode_step(monkeypatch):
    """Each station of the table calls the next one, with others between them or none."""
    stacks, real = [], torch_backend.step

    def step(*given, **more):
        frame, stack = sys._getframe(1), []
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT):
                stack.append((frame.f_code.co_name, path.relative_to(ROOT).as_posix()))
            frame = frame.f_back
        stacks.append(stack[::-1])
        return real(*given, **more)

    monkeypatch.setattr(torch_backend, "step", step)
    model, ids = make("llama_gqa"), prompt(1, 20)
    with kvpatch.patched(model, "h2o", 8), torch.no_grad():
        cache = model(ids).past_key_values
        model(ids[:, :1], past_key_values=cache)
    table = page("docs/architecture.md").split("## The way of a decode step")[1].split("The first layer of a step")[0]
    stations = re.findall(r"\| `(\w+)` \| `([\w/.]+)` \|", table)
    assert stations[-1] == ("step", "backends/torch_backend.py") and len(stations) > 5
    way = iter(stacks[0])
    assert all(station in way for station in stations[:-1]), stacks[0]
