"""The documentation: its code runs as pasted, its tables come from the library, its links lead somewhere."""

import functools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, Jais2Config, Jais2ForCausalLM

import kvpatch
from examples.chat import TEMPLATE
from kvpatch.arch.adapter import REGISTRY
from kvpatch.cli.commands import app
from kvpatch.cli.loading import MODELS
from kvpatch.evaluation.check import Checks
from kvpatch.policies import POLICIES
from kvpatch.policies.facts import FACTS, PAPERS
from kvpatch.policies.statistics import STATISTICS
from tests.helpers import tiny
from tests.test_readme import _words
from tools import docs_tables

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {"README.md": ROOT / "README.md"} | {str(path.relative_to(DOCS)): path for path in docs_tables.pages()}
TEXT = {name: path.read_text(encoding="utf-8") for name, path in PAGES.items()}
CODE = [
    (name, number, code)
    for name, text in TEXT.items()
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL), 1)
]


@pytest.fixture
def world(monkeypatch, tmp_path):
    """A fresh folder in which a shipped model stands where a block names one on the hub; registries are restored."""
    registries = POLICIES, REGISTRY, STATISTICS
    before = [dict(registry) for registry in registries]
    monkeypatch.chdir(tmp_path)
    for auto in (AutoModelForCausalLM, AutoTokenizer):
        own = auto.from_pretrained

        def load(name, *args, own=own, auto=auto, **options):
            assert re.fullmatch(r"[\w-]+/[\w.-]+", name), f"{name} is no name on the hub"
            loaded = own(MODELS / "llama-python", *args, **options)
            if auto is AutoTokenizer:  # the named model has one
                loaded.chat_template = TEMPLATE
            return loaded

        monkeypatch.setattr(auto, "from_pretrained", load)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # inductor takes half a minute
    yield
    for registry, old in zip(registries, before, strict=True):
        registry.clear()
        registry.update(old)


@pytest.mark.parametrize(("page", "number", "code"), CODE, ids=[f"{page}-{number}" for page, number, _ in CODE])
def test_code_runs_as_pasted(world, page, number, code):
    torch.manual_seed(0)
    exec(compile(code, f"{page}, block {number}", "exec"), {"__name__": "__main__"})


def test_the_notebook_runs(world):
    """Its code cells, one behind the other, as a kernel runs them."""
    cells = json.loads((ROOT / "examples/first_look.ipynb").read_text(encoding="utf-8"))["cells"]
    torch.manual_seed(0)
    names = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"first_look.ipynb, cell {number}", "exec"), names)
    assert 0.2 < float(names["share_T"].mean()) < 0.4 and len(names["chat"].messages) == 4


def test_there_is_code():
    pages = {page for page, _, _ in CODE}
    assert {"README.md", "quickstart.md", "extend/policy.md", "guides/serving.md", "guides/train.md"} <= pages


def test_the_landing_page_says_what_it_is_and_shows_it():
    page = TEXT["index.md"]
    for wanted in ("**Take it** if", "**You do not need it**", "pip install -e", "![", "(kept.png)", "guides/choose.md"):
        assert wanted in page.split("## Pages")[0], wanted
    (code,) = (code for name, _, code in CODE if name == "index.md")
    assert len(code.strip().splitlines()) <= 11


def _block(text):
    return next(code for _, _, code in CODE if text in code)


def test_the_policy_of_the_example_keeps_even_positions(world):
    names = {}
    exec(_block("every_other"), names)
    model, ids = tiny.make("llama"), tiny.prompt(1, 24)
    with kvpatch.patched(model, "every_other", k=0.5), torch.no_grad():
        cache = model(ids).past_key_values
    # of 24 tokens 12: 4 first, 3 newest, and the 5 newest even ones between; and the free slot
    assert sorted(cache.positions(0)[0, 0].tolist()) == [-1, 0, 1, 2, 3, 12, 14, 16, 18, 20, 21, 22, 23]


def test_the_row_of_the_example_is_right(world):
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
    exec(_block("register_arch"), {})
    assert [result for result in Checks(model).run() if not result.passed] == []


# ---- tables ----


def test_tables_come_from_the_library():
    stale = [name for name, text in TEXT.items() if docs_tables.refresh(text) != text]
    assert stale == [], "run python -m tools.docs_tables"


def test_a_new_policy_would_show(world):
    index = TEXT["policies/index.md"]
    kvpatch.register_policy("new_one", kvpatch.get_policy("h2o").with_options(recent=7))
    assert "| `new_one` |  | both | H2O |" in docs_tables.refresh(index)


def test_every_policy_has_a_page_and_every_public_name_an_entry():
    for name in kvpatch.list_policies():
        page = TEXT[f"policies/{name}.md"]
        assert page.startswith(f"# {name}\n"), name
        assert name == "full" or f"<!-- options: {name} -->" in page, name
    for name in kvpatch.__all__:
        assert name == "policies" or f":: kvpatch.{name}\n" in TEXT["reference/python.md"], name


def _entries(section):
    """BibTeX keys and titles by address of the papers that a page has entries of."""
    for key, body in re.findall(r"@\w+\{(\w+),(.*?)\n\}", section, re.DOTALL):
        address = re.search(r"(?:eprint += \{|arXiv:|url +=.*?\{)([^\s}]+)\}", body)[1]
        yield address, (key, re.sub("[{}]", "", re.search(r"title += (.*),", body)[1]))


def test_the_page_of_a_policy_cites_the_paper_of_its_row_first_and_every_paper_by_its_title_and_key():
    papers = {paper.address: (paper.key, paper.title) for paper in PAPERS.values()}
    for name, fact in FACTS.items():
        section = TEXT[f"policies/{name}.md"].partition("\n## Paper")[2]
        links = re.findall(r"\[([^\]]+)\]\((https://(?:arxiv|openreview)[^)]+)\)", section)
        linked = {link.removeprefix("https://arxiv.org/abs/"): title for title, link in links}
        entries = dict(_entries(section))
        assert [*linked][:1] == [*entries][:1] == ([fact.address] if fact.paper else []), name
        for address, (key, title) in entries.items():
            assert linked[address] == title and papers.get(address, (key, title)) == (key, title), f"{name}: {title}"
        for address in linked.keys() - entries.keys():
            assert linked[address] == papers[address][1], f"{name}: {linked[address]}"


# ---- links and names ----


def _anchors(text):
    """The anchors of a page's headings, as GitHub and MyST make them."""
    for title in re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE):
        words = re.sub(r"[`*]|\]\([^)]*\)|\[", "", title).strip().lower()
        yield re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


@pytest.mark.parametrize("name", sorted(TEXT))
def test_links_lead_somewhere(name):
    prose = re.sub(r"```.*?```", "", TEXT[name], flags=re.DOTALL)
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", prose):
        path = PAGES[name] if not link else (PAGES[name].parent / link).resolve()
        assert path.is_file(), f"{name}: {link}"
        if anchor:
            assert anchor in set(_anchors(path.read_text(encoding="utf-8"))), f"{name}: {link}#{anchor}"


def test_what_is_named_is_there_after_a_plain_import():
    found = {name for text in TEXT.values() for name in re.findall(r"`(kvpatch\.[A-Za-z_][\w.]*)", text)}
    names = sorted(name for name in found if not name.endswith(".py"))
    assert "kvpatch.check_model" in names
    modules = ("kvpatch.evaluation.lm_eval",)  # run with -m
    code = f"import kvpatch\nfor name in {[name for name in names if name not in modules]!r}: eval(name)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr


def test_errors_are_said_in_these_words():
    table = TEXT["errors.md"].split("<!-- errors -->")[1].split("<!-- /errors -->")[0].strip().splitlines()[2:]
    said = [words for path in (ROOT / "kvpatch").rglob("*.py") for words in _words(path)]
    for line in table:
        for part in line.strip("| ").split(" | ")[0].split(" ... "):
            assert any(part in words for words in said), part


def test_only_true_commands():
    known = {"demo", "plan", "calibrate", "learn", "check", "compare", "generate", "serve", "policies", "architectures"}
    for name, text in TEXT.items():
        bash = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
        for command in re.findall(r"^kvpatch (\w+)", bash, re.MULTILINE) + re.findall(r"`kvpatch ([a-z]\w*)", text):
            assert command in known, f"{name}: kvpatch {command}"


def _typed():
    """Commands of the pages' bash blocks, with the line that names each."""
    for name, text in TEXT.items():
        for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["kvpatch"]:
                    yield name, words[1:]


def test_commands_have_the_arguments_and_options_that_pages_type():
    group, count = typer.main.get_command(app), 0
    for name, (command, *arguments) in _typed():
        context = group.commands[command].make_context(command, arguments)  # raises for an option that is not there
        assert command not in ("calibrate", "learn") or (context.params["file"] and not context.params["option"]), name
        count += 1
    assert count > 12


def test_make_targets_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)) | {"help"}
    for name, text in TEXT.items():
        for target in re.findall(r"(?:`|^)make (?:\w+=\S+ )?([a-z][\w-]*)", text, re.MULTILINE):
            assert target in targets, f"{name}: make {target}"


def test_commands_of_this_repository_exist():
    for name, text in TEXT.items():
        for module in re.findall(r"python -m ((?:tools|examples)\.[\w.]+)", text):
            path = ROOT / module.rstrip(".").replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file() or module.endswith("NAME"), name


def test_pages_that_code_cites_exist():
    for folder in ("kvpatch", "tests", "tools", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            for page in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text(encoding="utf-8")):
                assert (ROOT / page).is_file(), f"{path.relative_to(ROOT)}: {page}"


def test_every_part_of_the_package_is_in_the_table_of_layers():
    table = TEXT["architecture.md"].split("## Layers")[1].split("\n## ")[0]
    named = set(re.findall(r"^\| (.+?) \|", table, re.MULTILINE))
    words = " ".join(named)
    for path in (ROOT / "kvpatch").iterdir():
        if (path.is_dir() and any(path.glob("*.py"))) or (path.suffix == ".py" and not path.name.startswith("__")):
            assert f"`{path.name}{'/' if path.is_dir() else ''}`" in words, path.name
    for name in re.findall(r"`([\w.]+/?)`", words):
        assert (ROOT / "kvpatch" / name).exists(), name
