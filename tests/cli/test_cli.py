"""The command line on a tiny random model: what it prints, exit codes, and one line for every mistake."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BertConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    PreTrainedTokenizerFast,
    T5Config,
)
from transformers.utils.import_utils import is_serve_available
from typer.testing import CliRunner

import kvpatch
from kvpatch import KVPatchError
from kvpatch.arch.llama import LlamaAdapter
from kvpatch.cli import demo, demo_view, generating, loading, story
from kvpatch.cli.commands import app
from kvpatch.cli.generating import MARK
from kvpatch.cli.loading import MODELS, load_tokenizer, parse_k
from kvpatch.cli.main import main
from kvpatch.cli.needles import read_needles
from kvpatch.evaluation.check import Checks
from kvpatch.evaluation.teacher_forcing import feed
from kvpatch.hooks.versions import ENGINE
from kvpatch.policies.budgets import Size
from kvpatch.storage.settings import OF_PATCH
from tests.arch.test_shells import make as reader
from tests.helpers import tiny
from tests.helpers.marks import INSTALLED
from tests.test_layers import imports

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A random Llama of 64 positions and a tokenizer of one token per byte."""
    path = tmp_path_factory.mktemp("model")
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(path)
    torch.manual_seed(0)
    _llama(64).save_pretrained(path)
    return path


def _llama(positions):
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def prompt(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("The quick brown fox jumps over")
    return path


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("text", "k"),
    [("mass:0.95", kvpatch.Mass(0.95)), ("Share: 0.5", kvpatch.Share(0.5)), ("threshold:.01", kvpatch.Threshold(0.01))],
)
def test_k_that_follows_the_text(text, k):
    assert parse_k(text) == k and parse_k(f"{text},0.5") == [k, 0.5]


@pytest.mark.parametrize("text", ["mass", "mass:", "mass:x", "mess:0.9", "mass:2", "mass:0.9:1"])
def test_k_that_follows_nothing(text):
    with pytest.raises(KVPatchError, match="mass:0.95, share:0.5, threshold:0.01|Mass\\(2.0\\): give a share"):
        parse_k(text)


@pytest.mark.parametrize(
    ("text", "k"), [("0.5", 0.5), ("1.0", 1.0), ("1024", 1024), ("2GiB", "2GiB"), ("2.5GiB", "2.5GiB"), ("50%", 0.5)]
)
def test_k(text, k):
    parsed = parse_k(text)
    assert parsed == k
    assert type(parsed) is type(k)


def test_k_is_a_list_with_commas_and_refused_by_its_form():
    assert parse_k("0.5, 12,2GiB") == [0.5, 12, "2GiB"]
    assert parse_k("50%,1e-1") == [0.5, 0.1]
    for text in ("-3", "7x", "half", "0.5.5"):
        with pytest.raises(kvpatch.KVPatchError, match=f"-k {text} is no budget: give a share of the prompt such as 0.5"):
            parse_k(text)


def test_policies_and_architectures():
    for command, names in (("policies", kvpatch.list_policies()), ("architectures", kvpatch.list_architectures())):
        result = run(command)
        assert result.exit_code == 0
        assert {line.split(" ")[0] for line in result.stdout.splitlines()} >= set(names)


def untimed(text):
    """Leave out a report's line of times."""
    return "\n".join(line for line in text.split("\n") if not line.startswith("time "))


def test_generate_writes_what_the_library_writes(folder, prompt):
    result = run("generate", "--model", folder, "--policy", "h2o", "-k", "0.5", "--prompt-file", prompt, "--max-new-tokens", 8)
    assert result.exit_code == 0
    model, tokenizer = LlamaForCausalLM.from_pretrained(folder), load_tokenizer(str(folder))
    ids = tokenizer(prompt.read_text(), return_tensors="pt").input_ids
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        new = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, 30:]
    text = tokenizer.decode(new)
    assert untimed(result.stdout).startswith(untimed(f"{text}\n\n{MARK}\n{patch.report()}\n"))
    assert patch.report().strip() in result.stdout
    assert "tokens held per head  15" in result.stdout


def test_generate_options_and_schedule(folder, prompt):
    arguments = ("generate", "--model", folder, "--prompt-file", prompt, "--max-new-tokens", 4, "-k", 8)
    result = run(*arguments, "--policy", "snapkv", "-o", "window=3", "-o", "pooling=None")
    assert result.exit_code == 0
    assert "budget                8 tokens" in result.stdout
    assert "tokens held per head  11" in result.stdout  # snapkv keeps the three tokens that were fed
    result = run(*arguments, "--policy", "keyformer", "--schedule", "decode")
    assert "(evicts while generating)" in result.stdout
    assert "tokens held per head  33" in result.stdout
    result = run(*arguments, "--backend", "torch")
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("attention by")]
    assert line.split()[2] == "torch" and line.endswith("(asked for)")
    result = run(*arguments, "--backend", "flash")
    assert result.exit_code == 2 and "backend='flash' cannot run here" in result.stderr


def test_a_long_prompt_loses_its_beginning_and_says_so(folder, tmp_path):
    text = "".join(chr(97 + i % 26) for i in range(100))
    (tmp_path / "long.txt").write_text(text)
    (tmp_path / "end.txt").write_text(text[-60:])
    arguments = ("generate", "--model", folder, "--max-new-tokens", 4, "--prompt-file")
    long, end = run(*arguments, tmp_path / "long.txt"), run(*arguments, tmp_path / "end.txt")
    assert "The prompt has 100 tokens; the model has 64 positions" in long.stderr
    assert "last 60 tokens are read" in long.stderr
    assert end.stderr == ""
    assert untimed(long.stdout) == untimed(end.stdout)


MISTAKES = [
    (["-k", "7x"], "-k 7x is no budget"),
    (["-k", "0.5,0.2,0.1"], "k has 3 entries, but the model has 2 layers"),
    (["--positions", "new"], "positions='new' must be one of original, renumbered"),
    (["--backend", "trition"], "Did you mean 'triton'?"),
    (["--device", "gpu"], "--device gpu cannot be used: give auto, cpu, cuda"),
    (["-k", "1.5"], "k=1.5 is not a share in (0, 1]"),
    (["--schedule", "never"], "schedule='never' must be one of"),
    (["--policy", "snapkv", "--schedule", "both"], "scores the tokens of a prompt, once it is read"),
    (["-o", "window"], "must look like name=value"),
    (["--dtype", "float23"], "Did you mean 'float32'?"),
    (["--model", "/no/such/folder"], "there is no such folder"),
    (["--max-new-tokens", "64"], "the model has 64 positions, so no room is left"),
    (["--prompt-file", "/no/such/file"], "cannot be read: No such file"),
]


@pytest.mark.parametrize(("wrong", "words"), MISTAKES)
def test_mistakes_cost_one_line(folder, prompt, wrong, words):
    result = run("generate", "--model", folder, "--prompt-file", prompt, "--max-new-tokens", 2, *wrong)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("kvpatch: ")
    assert words in line


def test_files_that_are_none(folder, tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").write_text(" \n")
    for name, words in (("binary", "is no UTF-8 text"), ("empty", "is empty")):
        result = run("generate", "--model", folder, "--prompt-file", tmp_path / name)
        assert result.exit_code == 2
        assert words in result.stderr
    _llama(64).save_pretrained(tmp_path / "bare")
    result = run("generate", "--model", tmp_path / "bare", "--prompt-file", folder / "config.json")
    assert result.exit_code == 2
    assert "comes without a tokenizer" in result.stderr.splitlines()[-1]
    (tmp_path / "bare" / "model.safetensors").write_bytes(b"none")
    result = run("check", "--model", tmp_path / "bare")
    assert result.exit_code == 2
    assert "cannot be loaded" in result.stderr.splitlines()[-1]
    result = run("check", "--model", tmp_path)
    assert result.exit_code == 2


@pytest.mark.parametrize("name", tiny.FIVE)
def test_checks_pass(name):
    results = Checks(tiny.make(name), "keyformer", 0.5).run()
    assert [result for result in results if not result.passed] == []
    assert len(results) == 7


@pytest.mark.parametrize("name", ["llama_gqa", "mpt", "gpt2"])
def test_checks_of_a_model_without_a_head_compare_hidden_states(name, monkeypatch):
    model = tiny.make(name).base_model
    results = Checks(model, "keyformer", 0.5).run()
    assert [result for result in results if not result.passed] == []
    assert len(results) == 7
    real = Size.tokens
    monkeypatch.setattr(Size, "tokens", lambda self, n: max(real(self, n) - 1, 1))
    failed = [result.name for result in Checks(model).run() if not result.passed]
    assert failed == ["eviction is the same as masking"]


def test_the_table_of_checks():
    """What the README and an error advise; it says in words whether all passed."""
    table = kvpatch.check_model(tiny.make("llama_gqa"), "roco", 9, seed=3)
    assert table.passed and [result.name for result in table] == [result.name for result in table.results]
    lines = str(table).splitlines()
    assert len(table) == 7 and [line[:4] for line in lines[:7]] == ["pass"] * 7
    assert all(result.name in line and result.detail in line for result, line in zip(table, lines, strict=False))
    assert f"may differ by {table.tolerance:.0e}" in lines[-1] and table.tolerance < 1e-5


def test_a_table_with_a_failure(monkeypatch):
    real = LlamaAdapter.output
    monkeypatch.setattr(LlamaAdapter, "output", lambda *given: real(*given) * 1.01)
    table = kvpatch.check_model(tiny.make("llama"))
    assert not table.passed and str(table).startswith("FAIL")


def test_generate_takes_every_setting(folder, prompt, monkeypatch):
    """Each of patched()'s own arguments has an option, whose value arrives."""
    given, real = {}, kvpatch.patched

    def patched(model, policy, k, **how):
        given.update(how)
        assert policy.schedule == "prompt"
        return real(model, policy, k, **how)

    monkeypatch.setattr(generating, "patched", patched)
    flags = ["--schedule", "prompt", "--bits", "8", "--block", "7", "--positions", "renumbered"]
    flags += ["--backend", "torch", "--seed", "3", "--strict"]
    result = run("generate", "--model", folder, "--prompt-file", prompt, "--max-new-tokens", "2", *flags)
    assert result.exit_code == 0, result.output
    wanted = {"bits": 8, "block": 7, "positions": "renumbered", "backend": "torch", "seed": 3, "strict": True}
    assert given == wanted and {*wanted, "schedule"} == set(OF_PATCH)


def test_check_passes_and_fails_with_the_exit_code(folder, monkeypatch):
    result = run("check", "--model", folder, "--policy", "roco", "-k", "9")
    assert result.exit_code == 0
    assert result.stdout.count("pass ") == 7
    assert re.search(r"may differ by \de-0[67]", result.stdout)
    real = LlamaAdapter.output
    monkeypatch.setattr(LlamaAdapter, "output", lambda *given: real(*given) * 1.01)
    result = run("check", "--model", folder)
    assert result.exit_code == 1
    assert "FAIL" in result.stdout


def test_check_of_a_model_that_reads_images(tmp_path):
    reader("mistral3").save_pretrained(tmp_path)
    result = run("check", "--model", tmp_path, "-k", "0.4")
    assert result.exit_code == 0 and result.stdout.count("pass ") == 7, result.output


SMALL = {"vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 1, "pad_token_id": 0, "eos_token_id": 1}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MambaConfig(**SMALL, state_size=4), "MambaForCausalLM keeps a recurrent state, not keys and values: there is nothing"),
        (BertConfig(**SMALL, num_attention_heads=2, intermediate_size=16), "BertLMHeadModel attends in both directions"),
        (T5Config(**SMALL, d_model=16, d_ff=16, num_layers=1, num_heads=2), "is of type t5, an encoder-decoder"),
    ],
    ids=lambda one: getattr(one, "model_type", ""),
)
def test_a_type_is_refused_before_its_weights_are_loaded(tmp_path, config, words):
    """The folder has no weights: each command says why the type cannot be served, rather than that they are missing."""
    config.save_pretrained(tmp_path)
    text = tmp_path / "text"
    text.write_text("a text " * 20)
    commands = {"check": (), "generate": (text,), "compare": (text, "--out", tmp_path)}
    commands |= dict.fromkeys(("calibrate", "learn"), (text,))
    commands |= {"serve": ()} if is_serve_available() and INSTALLED >= Version(ENGINE) else {}
    for command, arguments in commands.items():
        result = run(command, tmp_path, *arguments)
        assert result.exit_code == 2 and words in result.stderr.splitlines()[-1], (command, result.output)


def test_a_type_that_is_served_needs_its_weights(tmp_path):
    _llama(64).config.save_pretrained(tmp_path)
    result = run("check", tmp_path)
    assert result.exit_code == 2 and "cannot be loaded: Error no file named model.safetensors" in result.stderr, result.output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checks_see_one_token_too_few(dtype, monkeypatch):
    model = tiny.make("llama", dtype=dtype)
    real = Size.tokens
    monkeypatch.setattr(Size, "tokens", lambda self, n: max(real(self, n) - 1, 1))
    failed = [result.name for result in Checks(model).run() if not result.passed]
    assert failed == ["eviction is the same as masking"]


def test_checks_see_what_stays_behind(monkeypatch):
    model = tiny.make("llama")
    real = kvpatch.Patch.remove

    def remove(patch):
        real(patch)
        vars(model.model.layers[0])["left_behind"] = object()

    monkeypatch.setattr(kvpatch.Patch, "remove", remove)
    failed = [(result.name, result.detail) for result in Checks(model).run() if not result.passed]
    assert failed == [("the model is as it was after the block", "changed: model.layers.0.left_behind")]


@pytest.mark.parametrize("name", ["typer", "rich"])
def test_without_the_extra(name, monkeypatch, capsys):
    for module in [module for module in sys.modules if module.startswith("kvpatch.cli.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delattr(kvpatch.cli, "commands")
    for module in [module for module in sys.modules if module.split(".")[0] == name]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err == f"The command line needs {name}: pip install typer rich\n"


@pytest.mark.parametrize("command", ["compare", "demo"])
def test_without_matplotlib_nothing_is_measured(command, folder, prompt, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for module in (loading, demo):
        monkeypatch.setattr(module, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    given = ("--prompt-file", prompt) if command == "compare" else ()
    result = run(command, "--model", folder, "--out", tmp_path / "out", *given)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("kvpatch: Pictures need matplotlib: pip install ")


def test_the_models_of_the_demo_lie_in_the_package():
    assert MODELS.is_relative_to(Path(kvpatch.__file__).parent)
    assert {path.parent.name for path in MODELS.glob("*/model.safetensors")} == {"llama-0", "llama-python"}
    prompt, later = read_needles("cpu"), read_needles("cpu", in_prompt=False)
    assert (prompt.n, later.n, len(prompt.ids_BT)) == (234, 232, 24)
    assert torch.equal(prompt.ids_BT, later.ids_BT)
    start, stop = prompt.answer
    keys = [prompt.ids_BT[0, i] for i, _ in prompt.marks.asked]
    (asked,) = prompt.marks.asked
    assert keys == [prompt.ids_BT[0, 233]]
    assert torch.equal(prompt.ids_BT[0, asked[0] + 1 : asked[1]], prompt.ids_BT[0, 234 + start : 234 + stop])


def test_the_demo_s_texts_lie_on_the_device_of_their_model():
    stages = demo._make_stages(SimpleNamespace(device=torch.device("meta")))
    assert [stage.text.ids_BT.device.type for stage in stages.values()] == ["meta", "meta"]


@pytest.fixture
def reader_folder(folder, tmp_path):
    """A random model with room for the demo's text, whose tokens are its letters."""
    _llama(5000).save_pretrained(tmp_path / "model")
    load_tokenizer(str(folder)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_demo_on_a_model_of_ones_own(reader_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(story, "POLICIES", {"full": {}, "window": {}, "h2o": {}})
    monkeypatch.setattr(story, "ANSWER_TOKENS", 3)
    result = run("demo", reader_folder, "--out", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "kept.png").read_bytes().startswith(b"\x89PNG")
    full, window, h2o = rows = list(map(json.loads, result.stdout.splitlines()))
    assert [row["policy"] for row in rows] == ["full", "window", "h2o"]
    assert full["held"] == [1, 1, 1] and window["held"] == [0, 0, 1]  # the last answer stands at the end
    assert 0 < sum(h2o["held"][:2]) < 2
    assert window["nbytes"] == h2o["nbytes"] < 0.35 * full["nbytes"] == 0.35 * h2o["full_nbytes"]
    assert all(len(row["answers"]) == len(row["right"]) == len(story.QUESTIONS) for row in rows)


def test_demo_reads_no_question_before_it_evicts(reader_folder):
    model, tokenizer = loading.load_model(str(reader_folder)), load_tokenizer(str(reader_folder))
    reading = story.read_story(model, tokenizer)
    assert reading.text.endswith("rung at weddings of the crew and never otherwise.")
    for question, ids_1N in reading.asked.items():
        assert torch.equal(ids_1N[:, : reading.ids_1T.shape[1]], reading.ids_1T)
        assert tokenizer.decode(ids_1N[0, reading.ids_1T.shape[1] :]).split("sentence. ")[1] == f"{question}\nAnswer:"
    for words in story.QUESTIONS.values():
        assert tokenizer.decode(reading.ids_1T[0, reading.find_tokens(words)]) == words


def test_demo_refuses_a_model_without_room_for_its_text(folder, tmp_path):
    result = run("demo", folder, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "more than the positions of this model. Give another model, or none: kvpatch demo." in result.stderr


def test_feeding_equals_one_forward():
    model, ids = tiny.make("gpt2"), tiny.prompt(2, 12)
    mask = tiny.left_pad(ids, [12, 9])
    fed = feed(model, ids, 8, mask)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = model(ids, attention_mask=mask, position_ids=positions).logits[:, 7:]
    torch.testing.assert_close(fed.logits_BSV, expected)
    assert fed.cache.get_seq_length() == 12


def test_the_table_compares_an_outcome_with_the_full_cache():
    right, tokens = torch.tensor([True, True]), torch.tensor([[1, 2, 3, 4]])
    full = demo_view.DemoOutcome("full", 1.0, right, 1000, right, 0.0, tokens)
    half = demo_view.DemoOutcome("h2o", 0.5, torch.tensor([True, False]), 500, ~right, 1.0, tokens.clamp(max=3))
    cells = {"k": "0.5", "right": "1/2", "later": "0/2", "perplexity": "2.72", "as full": "75%"}
    assert half.format_cells(full) == cells | {"KV kB": "0", "of full": "50%"}


def test_the_package_imports_no_tools():
    named = {name for path in (ROOT / "kvpatch").rglob("*.py") for name in imports("x", path) if name.startswith("tools")}
    assert named == set()
