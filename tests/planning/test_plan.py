"""What a plan says beside bytes: what fits, what it refuses, and that it imports no torch where safetensors are at hand."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvpatch
from kvpatch import KVPatchError
from kvpatch.cli.commands import app
from kvpatch.planning.refused import REFUSED
from kvpatch.planning.repetition import find_repetition
from kvpatch.policies.needs.second_reading import Rereading

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    "dtype": "bfloat16",
}  # fmt: skip
"""Llama 3.1 8B: 128 KiB for each token, and 8.03 billion weights."""


@pytest.fixture
def folder(tmp_path):
    return save(tmp_path / "model")


def save(folder, **values):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | values))
    return folder


def test_numbers_that_are_known(folder):
    plan = kvpatch.plan(folder, "snapkv", 0.25, tokens=32768, batch=8, memory="80GB")
    assert plan.full == 32768 * 131072 == 4 * plan.held and set(plan.kept) == {8192}
    assert plan.weights == pytest.approx(2 * 8.03e9, rel=0.001)
    assert plan.memory == 80 * 10**9 and plan.positions == 131072
    assert plan.fit_full.requests == (plan.memory - plan.weights) // plan.full == 14
    assert plan.fit.requests == (plan.memory - plan.weights) // plan.reading == 50


def test_what_fits_is_the_most_that_fits(folder):
    def take(tokens):
        return kvpatch.plan(folder, "h2o", 0.25, tokens=tokens, batch=16).reading * 16

    plan = kvpatch.plan(folder, "h2o", 0.25, tokens=1000, batch=16, memory="40GiB")
    assert take(plan.fit.tokens) <= 40 * GIB - plan.weights < take(plan.fit.tokens + 1)
    assert plan.fit_full.tokens == (40 * GIB - plan.weights) // (16 * 131072)


def test_a_memory_smaller_than_the_weights_fits_nothing(folder):
    plan = kvpatch.plan(folder, memory="8GiB")
    assert plan.fit == plan.fit_full == (0, 0)


@pytest.mark.parametrize(
    ("values", "words"),
    [({"model_type": "of_nobody"}, "KeyError: 'of_nobody'"), ({"intermediate_size": "wide"}, "intermediate_size")],
)
def test_weights_that_cannot_be_counted_are_unknown(tmp_path, values, words):
    """A wrong number would promise requests that do not fit."""
    plan = kvpatch.plan(save(tmp_path, **values), memory="80GiB")
    assert plan.weights is plan.fit is plan.fit_full is None and plan.full == 32768 * 131072
    assert "weights                     unknown" in str(plan) and "requests that fit" not in str(plan)
    assert "- Bytes of the weights: unknown, and so is what fits: transformers makes no model of this config.json" in str(plan)
    assert words in plan.weights_from and json.loads(json.dumps(plan.to_dict()))["weights"] is None


def test_a_prompt_has_at_most_the_model_s_positions(tmp_path):
    assert kvpatch.plan(save(tmp_path / "long")).tokens == 32768
    short = save(tmp_path / "short", max_position_embeddings=2048)
    assert kvpatch.plan(short, new=48).tokens == 2000
    assert kvpatch.plan(short, memory="80GiB").fit.tokens == 2048
    assert "2,048, all its positions" in str(kvpatch.plan(short, memory="80GiB"))


IDS = ((1, 2, 3), (4, 5, 6, 7), (8,))
READINGS = [
    ("kvzip", {}, Rereading()),
    ("kvzip_plus", {"chunk": 64, "instruction": [1, 2]}, Rereading([1, 2], 64)),
    ("refit(snapkv)", {"chunk": 100}, Rereading((), 100)),
    ("critical(kvzip)", {"instruction": IDS}, Rereading(IDS)),
]


@pytest.mark.parametrize(("policy", "options", "need"), READINGS)
def test_a_prompt_that_is_read_twice_leaves_positions_for_it(tmp_path, policy, options, need):
    """The bound is that of the patch, which refuses a longer prompt before it reads any of it."""
    folder = save(tmp_path / "model", max_position_embeddings=32768)
    plan = kvpatch.plan(folder, policy, 0.3, memory="80GiB", **options)
    most = max(n for n in range(30000, 32768) if n + need.longest(n) <= 32768)
    assert plan.tokens == plan.longest == plan.fit.tokens == most and plan.fit_full.tokens == 32768
    said = str(plan)
    assert f"{most:,}, the most that it can read twice" in said and "The policy reads each prompt a second time" in said
    with pytest.raises(KVPatchError, match=rf"that the policy reads a second time is more .* \(--tokens {most}\)"):
        kvpatch.plan(folder, policy, 0.3, tokens=most + 1, **options)
    whole = kvpatch.plan(folder, policy, 1.0, memory="80GiB", **options)  # evicts nothing, and reads once
    assert whole.fit.tokens == 32768 and "second time" not in str(whole)


def test_new_tokens_take_the_positions_of_the_second_reading(tmp_path):
    short = save(tmp_path / "short", max_position_embeddings=2048)
    assert [kvpatch.plan(short, "kvzip", new=new).tokens for new in (0, 1000, 1500)] == [1024, 1024, 548]
    with pytest.raises(KVPatchError, match="2,048 positions, too few for an instruction: give a shorter one"):
        kvpatch.plan(short, "kvzip", instruction=[1] * 2048)
    plan = kvpatch.plan(save(tmp_path / "bloom", model_type="bloom"), "kvzip")
    assert plan.longest is None and "second time" not in str(plan)


def test_policies_that_read_twice_are_those_that_need_it():
    for name in kvpatch.list_policies():
        again = kvpatch.get_policy(name).needs.find(Rereading)
        assert (find_repetition(name, {}) is None) == (again is None), name


def test_tokens_after_the_prompt_are_kept_by_the_schedule(folder):
    def kept(policy, **options):
        return kvpatch.plan(folder, policy, 100, tokens=1000, new=50, **options).kept[0]

    assert [kept("snapkv"), kept("h2o"), kept("raas"), kept("full")] == [150, 100, 1050, 1050]
    assert [kept("h2o", schedule="prompt"), kept("h2o", every=10)] == [150, 109]


def test_a_list_has_a_budget_for_each_layer(tmp_path):
    folder = save(tmp_path, num_hidden_layers=2)
    assert kvpatch.plan(folder, "h2o", [0.5, 10], tokens=100).kept == (50, 10)
    assert kvpatch.plan(folder, "pyramidkv", 0.5, tokens=1000, window=8, beta=4).kept == (875, 125)


def test_sizes_in_bytes_are_tokens(folder):
    plan = kvpatch.plan(folder, "h2o", "1GiB", tokens=32768)
    assert plan.held == GIB and set(plan.kept) == {8192}


REMARKS = (
    ({}, "The policy evicts where the prompt ends"),
    ({"model_type": "mistral", "sliding_window": 4096}, "All 32 layers slide: the full cache holds the last 4,096"),
    ({"model_type": "gemma2", "sliding_window": 4096}, "16 of 32 layers slide: they hold the last 4,096"),
    ({"model_type": "qwen3_next", "full_attention_interval": 4}, "24 layers keep a state of fixed size"),
    ({"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
        "Latent attention: a layer holds one latent for each token"),
    ({"num_kv_shared_layers": 10}, "10 layers use the keys and values of others"),
    ({"model_type": "of_nobody"}, "kvpatch has no row for models of type of_nobody"),
    ({"quantization_config": {"bits": 4}}, "The weights are quantized"),
)  # fmt: skip


@pytest.mark.parametrize(("values", "words"), REMARKS)
def test_what_the_budget_cannot_do_is_said(tmp_path, values, words):
    said = str(kvpatch.plan(save(tmp_path / "one", **values)))
    assert words in said
    if values:
        assert words not in str(kvpatch.plan(save(tmp_path / "other")))


def test_layers_that_share_a_budget_hold_the_prompt(folder):
    shared, alone = (kvpatch.plan(folder, policy, 0.2, tokens=10000) for policy in ("kvzip", "snapkv"))
    assert shared.full + shared.allocated > shared.reading > shared.full > 4 * alone.reading
    assert "all of them hold the whole prompt" in str(shared) and "whole prompt" not in str(alone)


WRONG = (
    ({"k": 1.5}, "k=1.5 is not a share in (0, 1]. Give a share of the prompt such as k=0.5"),
    ({"k": "mass:0.9"}, "k=mass:0.9 follows the text, which a plan does not know: give a share such as 0.5"),
    ({"k": [0.5, 0.3]}, "k has 2 entries, but the model has 32 layers: give one for each."),
    ({"k": kvpatch.Mass(0.9)}, "follows the text"),
    ({"policy": "snapvk"}, "Unknown policy 'snapvk'. Did you mean 'snapkv'?"),
    ({"policy": "refti(kvzip)"}, "Unknown policy 'refti(kvzip)'. Did you mean 'refit(kvzip)'?"),
    ({"policy": "duo"}, "plan another policy, such as 'snapkv'"),
    ({"policy": "h2o", "k": 64, "every": 128}, "every=128 evicts more tokens at once than the budget of 64 keeps"),
    ({"policy": "snapkv", "every": 4}, "every=4 is for policies that evict while decoding"),
    ({"policy": "merged(Duo)"}, "plan another policy, such as 'snapkv'"),
    ({"policy": kvpatch.get_policy("h2o")}, "must be a policy's name, such as 'snapkv'"),
    ({"widow": 3}, "has no option 'widow'. Did you mean 'window'?"),
    ({"bits": 5}, "bits=5 must be 16, 8 or 4."),
    ({"schedule": "never"}, "schedule='never' must be one of prompt, decode, both"),
    ({"memory": "lots"}, "memory='lots' is no size: give a number and a unit such as 24GiB"),
    ({"memory": 0}, "memory=0 is no size"),
    ({"tokens": 0}, "tokens=0 must be a number of tokens, at least 1"),
    ({"batch": 0}, "batch=0 must be a number of requests, at least 1"),
    ({"new": -1}, "new=-1 must be a number of tokens, at least 0"),
    ({"tokens": 131072, "new": 10}, "give at most 131062 tokens (--tokens 131062)"),
    ({"policy": "kvzip", "chunk": 0}, "chunk=0 must be a number of tokens, at least 1"),
    ({"policy": "kvzip", "instruction": "Repeat"}, "instruction='Repeat' must be token ids"),
    ({"new": 131072}, "give fewer than 131072 new tokens"),
    ({"dtype": "int8"}, "dtype='int8' must be one of auto, float64, float32, bfloat16, float16"),
)


@pytest.mark.parametrize(("given", "words"), WRONG)
def test_what_is_out_of_range_is_refused(folder, given, words):
    with pytest.raises(KVPatchError, match=re.escape(words)):
        kvpatch.plan(folder, **given)


FILES = (
    ({"model_type": "mamba"}, "a model of type mamba has a recurrent state and no keys and values"),
    ({"model_type": "t5", "is_encoder_decoder": True}, "is an encoder-decoder. Name a decoder"),
    ({"model_type": ""}, "names no model_type"),
    ({"num_hidden_layers": None}, 'does not say num_hidden_layers: add it, such as "num_hidden_layers": 32'),
    ({"layer_types": ["conv"] * 32}, "has no layer with keys and values"),
)


@pytest.mark.parametrize(("values", "words"), FILES)
def test_models_that_cannot_be_planned(tmp_path, values, words):
    with pytest.raises(KVPatchError, match=re.escape(words)):
        kvpatch.plan(save(tmp_path, **values))


def test_a_model_without_a_configuration(tmp_path, monkeypatch):
    with pytest.raises(KVPatchError, match="has no config.json: name the folder that"):
        kvpatch.plan(tmp_path)
    with pytest.raises(KVPatchError, match="There is no folder ./none"):
        kvpatch.plan("./none")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(KVPatchError, match="cannot be read"):
        kvpatch.plan(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(KVPatchError, match="pip install huggingface_hub"):
        kvpatch.plan("someone/model")


def test_a_name_on_the_hub_is_asked_of_huggingface_hub(folder, monkeypatch):
    import huggingface_hub

    asked = []

    def download(name, file, revision=None):
        asked.append((name, file, revision))
        if file != "config.json":
            raise OSError("no such file\nmore")
        return str(folder / file)

    def fail(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", fail)
    plan = kvpatch.plan("someone/model", revision="main")
    assert asked == [("someone/model", one, "main") for one in ("config.json", "model.safetensors.index.json")]
    assert (plan.model, plan.weights_from) == ("someone/model", "config.json")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(KVPatchError, match="config.json of someone/model cannot be had: no network"):
        kvpatch.plan("someone/model")


def test_refused_types_are_those_of_the_page():
    page = (ROOT / "docs" / "architectures.md").read_text()
    rows = [
        row for part in page.split("are refused, before the model is touched")[1:] for row in part.split("\n\n")[1].splitlines()
    ]
    said = {}
    for row in rows[2:]:
        reason, kinds = [cell.strip() for cell in row.strip("|").split("|")]
        if reason not in ("what it has", "---"):
            said.setdefault(reason, set()).update(re.findall("`(.*?)`", kinds))
    assert said == {reason: set(kinds) for reason, kinds in REFUSED.items()}


@pytest.mark.parametrize(
    "values",
    [
        {"layer_types": ["full_attention"]},
        {"layer_types": [None] * 32},
        {"sliding_window": "7", "use_sliding_window": True},
        {"num_key_value_heads": -8},
        {"head_dim": "128"},
        {"max_position_embeddings": "many"},
    ],
    ids=str,
)
def test_a_value_that_no_configuration_has(tmp_path, values):
    with pytest.raises(KVPatchError, match=r"config.json of .*\(model_type llama\) has a value that cannot be read"):
        kvpatch.plan(save(tmp_path, **values))


# ---- the command ----


def test_the_command_imports_no_torch(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 16 * 10**9}}))
    code = "import runpy, sys\nsys.argv = ['kvpatch', 'plan', sys.argv[1], '--memory', '24GiB', '--policy', 'adaptive(h2o)']\n"
    code += "try:\n    runpy.run_module('kvpatch', run_name='__main__')\nexcept SystemExit as end:\n"
    code += "    print(end.code, [name for name in ('torch', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] in ("0 []", "None []"), done.stdout + done.stderr
    assert "requests that fit in 24 GiB" in done.stdout


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def test_the_table_and_the_object_say_the_same(folder):
    plan = kvpatch.plan(folder, "h2o", 0.3, tokens=2000, new=100, batch=4, bits=8, memory="24GiB", recent=0.2)
    given = ["--policy", "h2o", "-k", "0.3", "--tokens", 2000, "--max-new-tokens", 100, "--batch", 4, "--bits", 8]
    given += ["--memory", "24GiB", "-o", "recent=0.2"]
    found = run(folder, *given)
    assert found.exit_code == 0 and found.stdout.split() == str(plan).split()
    said = json.loads(run(folder, *given, "--json").stdout)
    assert said == json.loads(json.dumps(plan.to_dict() | {"k": "0.3"}))
    assert said["fit"] == {"requests": plan.fit.requests, "tokens": plan.fit.tokens}
    assert run("--model", folder, "-k", ",".join(["0.5"] * 32)).exit_code == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--memory", "24"], "--memory 24 has no unit: type --memory 24GiB"),
        (["-k", "7x"], "-k 7x is no budget"),
        (["--tokens", "200000"], "--tokens 131072"),
        (["--dtype", "bf17"], "Did you mean 'bf16'?"),
        (["--bits", "5"], "must be one of 16, 8, 4"),
        (["--memory", "9" * 400 + "GiB"], "is no size: give a number and a unit"),
        (["-o", "model=3"], "Policy 'snapkv' has no option 'model'"),
        (["-o", "window=-5"], "window=-5 must be a number of tokens"),
        (["--policy", "pyramidkv", "-o", "window=x"], "window='x' must be a number of tokens"),
        (["--policy", "pyramidkv", "-o", "beta=-1"], "beta=-1 must be a number of at least 1"),
    ],
)
def test_a_mistake_is_one_sentence(folder, given, words):
    done = run(folder, *given)
    assert done.exit_code == 2 and len(done.stderr.splitlines()) == 1 and words in done.stderr
