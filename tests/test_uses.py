"""One table says which policy suits which use; every page, example and command that names one for a use says the same."""

import ast
import inspect
import re
import shlex
from pathlib import Path

import pytest
import typer

import kvpatch
from examples import chat
from kvpatch.cli.commands import app
from kvpatch.cli.loading import parse_k
from kvpatch.cli.model_commands import check, generate
from kvpatch.cli.options import parse_options
from kvpatch.cli.serve_command import serve
from kvpatch.errors import KVPatchError
from kvpatch.policies import POLICIES
from kvpatch.policies.facts import FACTS
from kvpatch.policies.uses import USES, find_use, list_uses
from tests.cli.test_cli import run
from tools import docs_tables

ROOT = Path(__file__).parents[1]
NAMED = {name for use in USES for name in (use.policy, *use.also)}
OTHERS = {  # examples whose subject is not the choice of a policy, and why their policy is none of the table's
    "offloading": "critical_adakv",  # heads of different lengths, with values weighed
    "finetune_under_budget": "window",  # the harshest, and measured with it: docs/finetuning.md
    "sft_under_budget": "window",
    "grpo_under_budget": "window",
}


def test_the_table_names_policies_and_options_that_are_there():
    assert len({use.key for use in USES}) == len({use.name for use in USES}) == len(USES)
    for use in USES:
        assert {use.policy, *use.also} <= POLICIES.keys(), use.key
        kvpatch.get_policy(use.policy).with_options(**use.options)
        assert use.why.endswith(".") and not use.name.endswith(".")
        for name in re.findall("`(.*?)`", use.why):
            assert name in POLICIES, name


def test_a_use_is_found_by_its_key_and_a_slip_is_answered():
    assert find_use("chat").policy == "streaming_llm" and {use.key for use in list_uses("h2o")} == {"server"}
    assert [use.key for use in list_uses("tova")] == ["long"] and list_uses("window") == ()
    with pytest.raises(KVPatchError, match="Unknown use 'chatt'. Did you mean 'chat'.* Known: question, later"):
        find_use("chatt")


@pytest.mark.parametrize("page", ["README.md", "docs/policies/index.md", "docs/guides/choose.md"])
def test_a_page_has_the_table_and_a_stale_one_is_seen(page):
    text = (ROOT / page).read_text()
    assert "<!-- uses: " in text and docs_tables.refresh(text) == text
    broken = text.replace("[h2o]", "[tova]", 1)
    assert broken != text and docs_tables.refresh(broken) == text


def test_the_first_line_of_the_readme_and_the_first_code_are_of_the_table():
    call = "kvpatch." + find_use("question").write_call().replace('"snapkv"', 'policy="snapkv"')
    assert f"`with {call}:`" in (ROOT / "README.md").read_text().splitlines()[2]
    for page in ("README.md", "docs/index.md"):
        (first,) = re.findall(r"^with (.*?) as patch:", (ROOT / page).read_text(), re.MULTILINE)
        assert first == call, page


def _sections(page):
    """The text of each section by its heading."""
    parts = re.split(r"^###? (.+)$", (ROOT / page).read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _policies(text):
    """Policies that the code of a text names."""
    code = "\n".join(re.findall(r"```.*?```", text, re.DOTALL))
    return set(re.findall(r'policy="(\w+)"|--policy (\w+)|patch\(model, "(\w+)"|"policy": "(\w+)"', code))


def test_the_code_of_guides_takes_the_policy_of_the_use():
    serving = _sections("docs/guides/serving.md")
    wanted = {
        "A conversation": "chat", "Several users": "chat", "Streaming": "stream", "A server": "server", "Conversations": "chat"
    }  # fmt: skip
    for heading, key in wanted.items():
        found = {name for names in _policies(serving[heading]) for name in names if name}
        assert found == {find_use(key).policy}, heading
    for heading, text in serving.items():
        assert {name for names in _policies(text) for name in names if name} <= NAMED, heading
    for page, uses in {"chat": ["chat"], "many-questions": ["later"]}.items():
        text = (ROOT / f"docs/guides/{page}.md").read_text()
        found = {name for names in _policies(text) for name in names if name}
        assert found == {find_use(use).policy for use in uses}, page


def test_the_prose_of_choose_answers_each_use_with_the_policy_of_the_table():
    text = (ROOT / "docs/guides/choose.md").read_text().split("## Why")[1].split("\n## ")[0]
    answers = dict(re.findall(r"^\*\*(.+?): (`.+?)\*\*", text, re.MULTILINE))
    wanted = {
        "The question is in the prompt": "question", "Read now, ask later": "later",
        "Code, asked for in the prompt or later": "code", "A chat": "chat", "A server": "server",
        "A long answer": "long", "A stream without end": "stream",
    }  # fmt: skip
    assert answers.keys() == wanted.keys()
    for use, key in wanted.items():
        assert re.match(r"`(\w+)`", answers[use])[1] == find_use(key).policy, use


def test_examples_take_a_policy_of_the_table():
    chosen = {}
    for path in (ROOT / "examples").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == "main":
                arguments = node.args.args[len(node.args.args) - len(node.args.defaults) :]
                defaults = {one.arg: default for one, default in zip(arguments, node.args.defaults, strict=True)}
                if isinstance(defaults.get("policy"), ast.Constant):
                    chosen[path.stem] = defaults["policy"].value
    assert chosen.items() >= OTHERS.items() and len(chosen) > 8
    assert {name for name, policy in chosen.items() if policy not in NAMED} == OTHERS.keys()
    assert inspect.signature(chat.main).parameters["policy"].default == find_use("chat").policy


def test_commands_without_a_policy_take_the_one_of_their_use():
    assert inspect.signature(serve).parameters["policy"].default == find_use("server").policy
    for command in (generate, check):
        assert inspect.signature(command).parameters["policy"].default == find_use("question").policy


def test_the_options_of_the_command_line_are_those_of_the_call():
    for use in USES:
        words = shlex.split(use.write_options())
        context = typer.main.get_command(app).commands["generate"].make_context("generate", ["m", "f", *words])
        options = parse_options(context.params["option"])
        assert (context.params["policy"], parse_k(context.params["k"]), options) == (use.policy, use.k, use.options)


def test_the_list_of_policies_begins_with_the_uses():
    table = run("policies").stdout.split("\n\n")[0].splitlines()[1:]
    assert [re.split("  +", line) for line in table] == [[use.name, use.write_options()] for use in USES]
    for name, fact in FACTS.items():
        uses = [use.name for use in list_uses(name)]
        assert fact.describe_use().startswith("; ".join(uses) + ": ") or not uses, name
