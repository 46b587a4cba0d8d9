"""`kvpatch generate` and the loading of models: chat templates, sampling, and code that comes with a model."""

import json
import subprocess
import sys

import pytest
import torch
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers import LlamaForCausalLM

import kvpatch
from kvpatch.cli import loading
from kvpatch.cli.generating import MARK, encode_message, list_arguments
from kvpatch.cli.loading import check_dtype, load_model, load_tokenizer
from kvpatch.cli.options import TextFile, find_model, find_model_and_files, find_model_and_text, parse_options
from kvpatch.errors import KVPatchError
from tests.cli.test_cli import folder, prompt, run  # noqa: F401


@pytest.fixture(scope="module")
def chatty(folder, tmp_path_factory):  # noqa: F811
    """The model of test_cli.py with a chat template."""
    path = tmp_path_factory.mktemp("chatty")
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<reply>"
    tokenizer.save_pretrained(path)
    LlamaForCausalLM.from_pretrained(folder).save_pretrained(path)
    return path


def library(path, ids, **how):
    model = LlamaForCausalLM.from_pretrained(path)
    with kvpatch.patched(model, "snapkv", 0.5):
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, pad_token_id=0, **how)
    return load_tokenizer(str(path)).decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_the_chat_template_is_used_unless_raw(chatty, prompt):  # noqa: F811
    model, tokenizer = LlamaForCausalLM.from_pretrained(chatty), load_tokenizer(str(chatty))
    ids, said = encode_message(model, tokenizer, "Hello", False, 8)
    assert (tokenizer.decode(ids[0]), said) == ("<user>Hello<reply>", "")
    assert tokenizer.decode(encode_message(model, tokenizer, "Hello", True, 8)[0][0]) == "Hello"
    told = tokenizer(f"<user>{prompt.read_text()}<reply>", return_tensors="pt").input_ids
    plain = tokenizer(prompt.read_text(), return_tensors="pt").input_ids
    arguments = ("generate", chatty, prompt, "--max-new-tokens", 8)
    for more, ids in (((), told), (("--raw",), plain)):
        result = run(*arguments, *more)
        assert result.exit_code == 0, result.output
        assert result.stdout.startswith(f"{library(chatty, ids, do_sample=False)}\n\n{MARK}\n")


def test_sampling_is_the_model_s_with_the_seed(folder, prompt):  # noqa: F811
    ids = load_tokenizer(str(folder))(prompt.read_text(), return_tensors="pt").input_ids
    torch.manual_seed(5)
    wanted = library(folder, ids, do_sample=True, temperature=2.0, top_p=0.9)
    greedy = library(folder, ids, do_sample=False)
    arguments = ("generate", folder, prompt, "--max-new-tokens", 8, "--seed", 5)
    sampled = run(*arguments, "--temperature", 2.0, "--top-p", 0.9)
    assert sampled.stdout.startswith(f"{wanted}\n") and wanted != greedy
    assert run(*arguments).stdout.startswith(f"{greedy}\n")
    assert run(*arguments, "--temperature", 0).stdout.startswith(f"{greedy}\n")


def test_sampling_arguments():
    assert list_arguments(4) == {"max_new_tokens": 4, "do_sample": False}
    assert list_arguments(4, 0.0, 0.9) == {"max_new_tokens": 4, "do_sample": False}
    assert list_arguments(4, 0.7) == {"max_new_tokens": 4, "do_sample": True, "temperature": 0.7, "top_p": 1.0}
    assert list_arguments(4, None, 0.9) == {
        "max_new_tokens": 4,
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.9,
    }
    assert list_arguments(4, None, 0.0)["top_p"] == 0.0, "of no mass the likeliest token alone is left"


def test_generate_in_json_and_from_the_command_line(folder, prompt):  # noqa: F811
    result = run("generate", folder, "--prompt", prompt.read_text(), "--max-new-tokens", 8, "--json")
    (line,) = result.stdout.splitlines()
    row = json.loads(line)
    ids = load_tokenizer(str(folder))(prompt.read_text(), return_tensors="pt").input_ids
    assert row["text"] == library(folder, ids, do_sample=False)
    assert row["new_tokens"] == 8 and row["report"]["policy"] == "snapkv"


def test_k_of_one_is_said(folder, prompt):  # noqa: F811
    arguments = ("generate", folder, prompt, "--max-new-tokens", 2, "--policy", "h2o", "-k")
    said = run(*arguments, "1").stderr
    assert said == "kvpatch: k=1 keeps one token per KV head. If all are meant, k=1.0 keeps everything.\n"
    assert run(*arguments, "1.0").stderr == run(*arguments, "2").stderr == ""


def test_k_per_layer(folder, prompt):  # noqa: F811
    result = run("generate", folder, prompt, "--max-new-tokens", 2, "--policy", "h2o", "-k", "0.5,9")
    assert result.exit_code == 0, result.output
    assert "layer by layer: 0.5 of the prompt, 9 tokens" in result.stdout


def test_check_in_json(folder):  # noqa: F811
    result = run("check", folder, "--policy", "h2o", "-k", "9", "--json", "-o", "recent=3")
    row = json.loads(result.stdout)
    assert row["passed"] and len(row["checks"]) >= 5 and {"name", "passed", "detail"} == set(row["checks"][0])


def test_check_loads_the_checkpoint_s_own_dtype(folder, tmp_path):  # noqa: F811
    LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert "In bfloat16" in run("check", tmp_path, "--policy", "h2o").stdout
    assert "In float32" in run("check", tmp_path, "--policy", "h2o", "--dtype", "fp32").stdout


def test_short_names_of_dtypes():
    assert [check_dtype(name) for name in ("fp16", "BF16", "fp32", "auto")] == ["float16", "bfloat16", "float32", "auto"]


CODE = """
import pathlib
from transformers import LlamaConfig, LlamaForCausalLM
pathlib.Path({!r}).write_text("ran")
class OwnConfig(LlamaConfig):
    model_type = "own_llama"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_a_model_runs_only_when_told(folder, prompt, tmp_path, monkeypatch):  # noqa: F811
    """The folder's code writes a file when it runs."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    model, ran = tmp_path / "model", tmp_path / "ran"
    LlamaForCausalLM.from_pretrained(folder).save_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "own_llama", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}
    (model / "config.json").write_text(json.dumps(config))
    (model / "own.py").write_text(CODE.format(str(ran)))
    with pytest.raises(KVPatchError, match=r"cannot be loaded: .*Read that code, then give --trust-remote-code\."):
        load_model(str(model))
    assert not ran.exists()
    loaded = load_model(str(model), trust_remote_code=True)
    assert ran.read_text() == "ran" and type(loaded).__name__ == "OwnModel"


def test_options_of_loading_arrive(folder, prompt, monkeypatch):  # noqa: F811
    given = {}

    def load(**how):
        given.update(how)
        raise KVPatchError("enough")

    monkeypatch.setattr(loading, "load_model", load)
    options = ("--device-map", "auto", "--revision", "v2", "--trust-remote-code", "--dtype", "bf16", "--device", "cuda:1")
    wanted = {"name": "a/b", "dtype": "bf16", "device": "cuda:1", "device_map": "auto", "revision": "v2"}
    wanted["trust_remote_code"] = True
    for arguments in (("generate", "a/b", prompt), ("check", "a/b"), ("compare", "a/b", prompt)):
        given.clear()
        result = run(*arguments, *options, *(("--out", prompt.parent / "out") if arguments[0] == "compare" else ()))
        assert (result.exit_code, result.stderr) == (2, "kvpatch: enough\n")
        assert given == wanted


def test_bars_of_downloads_stay_on():
    try:
        enable_progress_bars()
        loading.silence_loading()
        assert not are_progress_bars_disabled()
        disable_progress_bars()  # who turned them off keeps them off
        loading.silence_loading()
        assert are_progress_bars_disabled()
    finally:
        enable_progress_bars()


def test_arguments_and_options_name_the_model_and_the_files():
    assert find_model("m", None) == find_model(None, "m") == "m"
    a, b, of_option = TextFile("a"), TextFile("b"), TextFile("a", "--prompt-file")
    assert find_model_and_files("m", ["a", "b"], None) == ("m", [a, b])
    assert find_model_and_files("m", None, None, ["a"]) == ("m", [of_option])
    assert find_model_and_files("a", ["b"], "m") == ("m", [a, b])  # after --model every argument is a file
    assert find_model_and_files(None, None, "m", ["a"]) == ("m", [of_option])
    for arguments, words in (((None, None, None), "Name a model"), (("m", None, None), "Name a file")):
        with pytest.raises(KVPatchError, match=words):
            find_model_and_files(*arguments)


def test_a_text_is_an_argument_or_the_option_of_before():
    for arguments in (("m", "t", None, None), ("t", None, "m", None)):
        assert find_model_and_text(*arguments, None) == ("m", TextFile("t"))
    for arguments in (("m", None, None, "t"), (None, None, "m", "t")):
        assert find_model_and_text(*arguments, None) == ("m", TextFile("t", "--text"))
    for arguments, words in (
        ((None, None, None, None), "Name a model"),
        (("m", None, None, None), "Give a text after the model"),
        (("m", "t", None, "u"), "The text is given twice: t and u"),
    ):
        with pytest.raises(KVPatchError, match=words):
            find_model_and_text(*arguments, None)


@pytest.mark.parametrize("command", ["calibrate", "learn"])
def test_o_is_an_option_of_a_policy_everywhere(command):
    """It once was the output file of these two."""
    for flag in ("-o", "--option"):
        result = run(command, "m", "t", flag, "x.json")
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith("kvpatch: -o sets an option of a policy") and "--out x.json" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "label"),
    [
        (("generate", "m", "no.txt"), "FILE no.txt"),
        (("generate", "m", "--prompt-file", "no.txt"), "--prompt-file no.txt"),
        (("calibrate", "m", "no.txt"), "FILE no.txt"),
        (("learn", "m", "--text", "no.txt"), "--text no.txt"),
    ],
)
def test_a_missing_file_is_named_as_it_was_given(arguments, label):
    result = run(*arguments)
    assert result.exit_code == 2 and result.stderr == f"kvpatch: {label} cannot be read: No such file or directory\n"


@pytest.mark.parametrize(
    ("policy", "command"),
    [("q_filter", "calibrate"), ("Tri-Attention", "calibrate"), ("merged(q_filter)", "calibrate"), ("learned", "learn")],
)
@pytest.mark.parametrize(
    "how", [("generate", "m", "f", "--policy"), ("check", "m", "--policy"), ("compare", "m", "f", "--policies")]
)
def test_a_calibration_is_asked_for_in_the_words_of_a_shell(how, policy, command):
    """Before the model is looked for, and without a word of Python."""
    result = run(*how, policy)
    assert result.exit_code == 2
    assert f"run `kvpatch {command} MODEL FILE --out " in result.stderr and "give -o calibration=" in result.stderr
    assert "kvpatch." not in result.stderr


def test_options_may_share_a_flag():
    options = parse_options(["window=16,pooling=max", "tau=(1.0, 2.0)", "protect=[3,4], sinks=2"])
    assert options == {"window": 16, "pooling": "max", "tau": (1.0, 2.0), "protect": [3, 4], "sinks": 2}
    for wrong in ("window", "=3", "window=", "a=1,=2"):
        with pytest.raises(KVPatchError, match="must look like name=value"):
            parse_options([wrong])


def test_an_option_that_is_given_twice_is_refused():
    """The first one was dropped without a word."""
    for twice in (["recent=0.1", "recent=0.9"], ["recent=0.1,sinks=2,recent=0.1"]):
        with pytest.raises(KVPatchError, match="--option recent is given twice: 0.1 and 0.[19]"):
            parse_options(twice)


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_prompt_is_refused_before_the_model_is_looked_for(text):
    result = run("generate", "m", "--prompt", text)
    assert (result.exit_code, result.stderr) == (2, "kvpatch: --prompt is empty: there is nothing to go on from.\n")


@pytest.mark.parametrize("command", ["calibrate", "learn"])
def test_a_place_that_cannot_be_written_is_refused_before_the_text_is_measured(command, tmp_path):
    (tmp_path / "t.txt").write_text("a text")
    for out in (tmp_path, tmp_path / "none" / "c.safetensors"):
        result = run(command, "m", str(tmp_path / "t.txt"), "--out", str(out))
        assert result.exit_code == 2 and result.stderr.startswith(f"kvpatch: --out {out} cannot be written")


def test_the_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "kvpatch", "--version"], capture_output=True, text=True)
    assert done.stdout.startswith(f"kvpatch {kvpatch.__version__} ")
