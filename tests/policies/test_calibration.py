"""Calibrations: what is measured, the file, and the policy that reads it."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvpatch
from kvpatch import KVPatchError
from kvpatch.evaluation.calibrate import calibrate
from kvpatch.policies.calibration import Calibration
from kvpatch.storage.calibration import FORMAT, save_calibration
from kvpatch.storage.file import checksum
from tests.cli.test_cli import folder, run  # noqa: F401
from tests.helpers.comparing import certain
from tests.helpers.tiny import make, prompt
from tests.oracle import reference
from tests.oracle.reference_models import decoder_of

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture(scope="module")
def model():
    return make("llama_gqa", dtype=torch.float64)


@pytest.fixture(scope="module")
def calibration(model):
    with torch.no_grad():
        return calibrate(model, [prompt(1, 30, seed=3), prompt(1, 17, seed=4)])


@pytest.fixture
def path(calibration, tmp_path):
    save_calibration(calibration, tmp_path / "calibration.safetensors")
    return tmp_path / "calibration.safetensors"


def test_directions_are_those_of_the_queries(model, calibration):
    """By a singular value decomposition of all queries, from the oracle."""
    options, queries = reference.settings("full", {}), [[[], []] for _ in range(2)]
    for n, seed in ((30, 3), (17, 4)):
        oracle = reference.Oracle(decoder_of(model), n, 1.0, options, 1, None)
        oracle.forward(prompt(1, n, seed=seed)[0].tolist())
        for l, heads in enumerate(oracle.asked):
            for h, asked in enumerate(heads):
                queries[l][h // oracle.G] += asked.values()
    assert calibration.tokens == 47 and sorted(calibration.directions) == [0, 1]
    for l, heads in enumerate(queries):
        for g, rows in enumerate(heads):
            q = torch.stack(rows).double()
            wanted = torch.linalg.svd(q).Vh[0]
            wanted = wanted * (1 if q.mean(0) @ wanted > 0 else -1)
            torch.testing.assert_close(calibration.directions[l][g].double(), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("more", [{}, {"schedule": "decode"}, {"bits": 8, "every": 3}, {"block": 7, "sinks": 2}], ids=str)
def test_as_the_oracle_has_it(model, calibration, more):
    certain("llama_gqa", "q_filter", 0.3, steps=14, model=model, calibration=calibration, **more)


def test_kernels_attend_and_torch_evicts_alike(model, calibration):
    certain("llama_gqa", "q_filter", 9, model=model, calibration=calibration, backend="torch", pads=(0, 0))


def test_the_file_is_read_as_it_was_written(model, calibration, path):
    again = kvpatch.load_calibration(path)
    assert again == calibration and again.model == dict(calibration.model) and repr(again) == repr(calibration)
    assert len({again, calibration}) == 1
    with kvpatch.patched(model, "q_filter", 6, calibration=again) as patch:
        cache = patch.new_cache()
        model(prompt(1, 12), past_key_values=cache)
        patch.save_cache(cache, path.with_name("cache"))
        assert patch.load_cache(path.with_name("cache")).get_seq_length() == 12
    other = Calibration(again.model, again.directions, 48, "0" * 64)
    with kvpatch.patched(model, "q_filter", 6, calibration=other) as patch, pytest.raises(KVPatchError, match="calibration"):
        patch.load_cache(path.with_name("cache"))


def rewritten(path, change):
    """The file with another description or other tensors, under a right checksum."""
    tensors = load_file(path)
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    about = json.loads(header["__metadata__"]["kvpatch"])
    change(about, tensors)
    text = json.dumps(about)
    save_file(tensors, path, metadata={"kvpatch": text, "checksum": checksum(text, tensors)})


def numbers(about, tensors):
    tensors["0.direction"][0, 0] = torch.nan


def shape(about, tensors):
    tensors["1.direction"] = torch.zeros(3)


BAD = [
    (lambda about, t: about.update(format="kvpatch cache 4"), f"not of this version of kvpatch ..{FORMAT}"),
    (lambda about, t: about.update(more=1), "its description has"),
    (lambda about, t: about.update(tokens=0), "names no model, or no tokens"),
    (lambda about, t: about.update(layers=[0, 0]), "its layers are"),
    (lambda about, t: t.pop("1.direction"), "it holds 0.direction"),
    (numbers, "not finite"), (shape, "1.direction is torch.float32 .3. where"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "says"), BAD, ids=[says for _, says in BAD])
def test_a_file_that_is_none(path, change, says):
    rewritten(path, change)
    with pytest.raises(KVPatchError, match=f"no valid calibration: .*{says}.*kvpatch calibrate"):
        kvpatch.load_calibration(path)


def test_an_altered_file_and_none(path, tmp_path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(KVPatchError, match="its checksum does not match, so it was altered"):
        kvpatch.load_calibration(path)
    path.write_bytes(content[:40])
    with pytest.raises(KVPatchError, match="truncated or no such file"):
        kvpatch.load_calibration(path)
    with pytest.raises(KVPatchError, match="There is no file .*kvpatch calibrate"):
        kvpatch.load_calibration(tmp_path / "none")
    with pytest.raises(KVPatchError, match="path=3 is no path"):
        kvpatch.load_calibration(3)


def test_another_model_and_other_shapes(model, calibration):
    with pytest.raises(KVPatchError, match="calibration= is of another model: .*Run `kvpatch calibrate` on this model"):
        kvpatch.patch(make("llama_gqa", dtype=torch.float64, seed=1), "q_filter", 6, calibration=calibration)
    fewer = dataclasses.replace(calibration, directions={0: calibration.directions[0]})
    with pytest.raises(KVPatchError, match="calibration= has nothing for layer 1"):
        kvpatch.patch(model, "q_filter", 6, calibration=fewer)
    for given, says in ((None, "needs a calibration of this model: run `kvpatch calibrate"), ("file", "is no calibration")):
        with pytest.raises(KVPatchError, match=says):
            kvpatch.patch(model, "q_filter", 6, calibration=given)
    with pytest.raises(KVPatchError, match="positions='renumbered' does not go with policy 'q_filter'"):
        kvpatch.patch(model, "q_filter", 6, calibration=calibration, positions="renumbered")


def test_from_the_command_line(folder, tmp_path):  # noqa: F811
    (tmp_path / "text").write_text("what it reads, and reads again " * 9)
    out = tmp_path / "c.safetensors"
    assert "Name a text: --text FILE" in run("calibrate", folder, "-o", out).output
    result = run("calibrate", folder, "--text", tmp_path / "text", "-o", out, "--length", 50, "--tokens", 120, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["tokens"] == kvpatch.load_calibration(out).tokens <= 120
    arguments = ("generate", folder, "--prompt", "what it reads", "--max-new-tokens", 3, "--policy", "q_filter", "-k", 4)
    assert run(*arguments, "-o", f"calibration={out}").exit_code == 0
    assert "needs a calibration" in run(*arguments).output
