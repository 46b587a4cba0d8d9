"""Nothing here runs what it is given, and nothing is written but where told."""

import ast
import os
import socket
from pathlib import Path

import pytest
import torch

import kvpatch
from tests.cli.test_cli import folder, run  # noqa: F401

ROOT = Path(__file__).parents[2]
SOURCES = [path for part in ("kvpatch", "tools", "examples") for path in sorted((ROOT / part).rglob("*.py"))]
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "code", "codeop", "runpy", "imp"}
CHOICE = "trust_remote_code"  # the command line's option hands it on, false unless it is given; nothing else may
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {("torch", "load"), ("torch", "save"), ("np", "load"), ("numpy", "load"), ("yaml", "load"), ("os", "system")}


def _offences(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append(node.module or "")
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id in CALLS:
                found.append(called.id)
            if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
                found += [called.attr] if (called.value.id, called.attr) in METHODS else []
            for keyword in node.keywords:
                handed_on = keyword.arg == CHOICE and ast.unparse(keyword.value) in (CHOICE, f"self.{CHOICE}")
                if keyword.arg in (CHOICE, "allow_pickle", "shell") and not (_false(keyword.value) or handed_on):
                    found.append(f"{keyword.arg}=")
                if keyword.arg == "weights_only" and _false(keyword.value):
                    found.append("weights_only=False")
        elif isinstance(node, ast.Constant) and node.value == "trust_remote_code":
            found.append("trust_remote_code")
    return found


def _handing_on(path: Path) -> list[str]:
    """Parameters and fields of that name whose default is not False."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            plain, named = node.args.posonlyargs + node.args.args, node.args.kwonlyargs
            given = {argument.arg: default for argument, default in zip(named, node.args.kw_defaults, strict=True)}
            given |= {one.arg: default for one, default in zip(plain[::-1], node.args.defaults[::-1], strict=False)}
            names = [argument.arg for argument in (*plain, *named)]
            found += [node.name] if CHOICE in names and not _is_false(given.get(CHOICE)) else []
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == CHOICE:
            found += [] if _is_false(node.value) else [ast.unparse(node)]
    return found


def _is_false(node: ast.expr | None) -> bool:
    return node is not None and _false(node)


def test_code_of_a_model_runs_only_where_the_user_says_so():
    named = [path.relative_to(ROOT).as_posix() for path in SOURCES if CHOICE in path.read_text(encoding="utf-8")]
    commands = ("calibrate_command", "loading", "model_class", "model_commands", "serve_command")
    assert named == [*(f"kvpatch/cli/{command}.py" for command in commands), "kvpatch/planning/weights.py"]
    assert [_handing_on(ROOT / path) for path in named] == [[]] * len(named)


def _false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(ROOT)) for path in SOURCES])
def test_no_code_comes_from_data(path):
    assert _offences(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "from pickle import loads", "eval('1')", "exec(text)", "import torch; torch.load(p)",
        "import numpy as np; np.load(p)",
        "AutoModel.from_pretrained(n, trust_remote_code=True)", "f(**{'trust_remote_code': True})",
        "np.load(p, allow_pickle=True)",
        "subprocess.run(c, shell=True)", "import os; os.system(c)", "import dill.source", "g(p, weights_only=False)",
    ],
)  # fmt: skip
def test_what_would_be_found(line):
    assert _offences(line)


# ---- where the command line writes ----


def _files(place: Path) -> dict[str, tuple[int, int]]:
    found = [(one, one.stat()) for one in place.rglob("*") if one.is_file()]
    return {str(one.relative_to(place)): (stat.st_size, stat.st_mtime_ns) for one, stat in found}


@pytest.fixture
def places(tmp_path, monkeypatch, folder):  # noqa: F811
    """An empty working folder, an empty home, and the model's folder; no network."""
    work, home, given = tmp_path / "work", tmp_path / "home", tmp_path / "given"
    for place in (work, home, given):
        place.mkdir()
    (given / "prompt.txt").write_text("The quick brown fox jumps over")
    monkeypatch.chdir(work)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "MPLCONFIGDIR", "HF_HOME", "TMPDIR"):
        monkeypatch.setenv(name, str(home))
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was asked"))
    return work, home, given


COMMANDS = {
    "policies": (("policies",), set()),
    "architectures": (("architectures",), set()),
    "generate": (("generate", "--model", "MODEL", "--prompt-file", "PROMPT", "--max-new-tokens", 2), set()),
    "check": (("check", "--model", "MODEL", "--policy", "h2o"), set()),
    "compare": (
        ("compare", "--model", "MODEL", "--prompt-file", "PROMPT", "--policies", "h2o", "-k", "0.5", "--max-new-tokens", 2,
         "--out", "OUT", "--json"),
        {"out/compare.png", "out/settings.json"},
    ),
    "a mistake": (("compare", "--model", "MODEL", "--prompt-file", "PROMPT", "--policies", "h20", "--out", "OUT"), set()),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_writes_only_where_told(name, places, folder):  # noqa: F811
    work, home, given = places
    arguments, written = COMMANDS[name]
    told = {"MODEL": folder, "PROMPT": given / "prompt.txt", "OUT": given / "out"}
    before = _files(folder), _files(given), set(os.listdir(ROOT))
    result = run(*(told.get(str(one), one) for one in arguments))
    assert result.exit_code == (2 if name == "a mistake" else 0), result.output
    assert _files(work) == {}
    others = [one for one in _files(home) if not one.startswith(("fontlist", "matplotlib"))]
    assert others == [], "matplotlib keeps a list of fonts"
    assert _files(folder) == before[0]
    now = _files(given)
    assert {one for one in now if one not in before[1]} == written
    assert all(now[one] == before[1][one] for one in before[1])
    assert set(os.listdir(ROOT)) == before[2]


def test_save_cache_and_plot_write_one_file(places):
    from tests.helpers.tiny import make, prompt

    work, home, given = places
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 0.5) as patch, torch.no_grad():
        cache = model(prompt(1, 12)).past_key_values
        patch.save_cache(cache, given / "cache")
        patch.load_cache(given / "cache")
        patch.report().plot(given / "kept.png")
    assert set(_files(given)) == {"prompt.txt", "cache", "kept.png"}
    assert _files(work) == {}
