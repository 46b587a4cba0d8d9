"""Records in a file: read as they were written, refused where they cannot be right; their size before they are made."""

import re

import pytest
import torch

import kvpatch
from kvpatch import KVPatchError
from tests.attention.test_replay import close, recorded
from tests.helpers.files import rewritten
from tests.helpers.running import logits_of
from tests.helpers.tiny import left_pad, make, prompt


@pytest.fixture(scope="module")
def rollout():
    """A model, the texts of a padded batch, their mask, logits behind the prompt, and their record."""
    model, ids, fed = make("llama_gqa", dtype=torch.float64), prompt(2, 20), prompt(2, 8, seed=5)
    mask = left_pad(ids, [20, 13])
    (logits,), record, text = recorded(model, [(ids, fed)], mask=mask)
    return model, text, torch.cat([mask, torch.ones_like(fed)], 1), logits, record


@pytest.fixture
def path(rollout, tmp_path):
    kvpatch.save_record(rollout[-1], tmp_path / "rollout.safetensors")
    return tmp_path / "rollout.safetensors"


def test_a_replay_from_a_file(rollout, path):
    model, text, mask, logits, record = rollout
    again = kvpatch.load_record(path)
    assert again.model == record.model and again.nbytes == record.nbytes and len(again) == 2
    for mine, own in zip((again.ids, *again.deaths), (record.ids, *record.deaths), strict=True):
        assert mine.dtype == own.dtype and torch.equal(mine, own)
    with torch.no_grad(), kvpatch.replay(model, again):
        close(logits_of(model, text, mask)[:, 19:], logits)
    with pytest.raises(KVPatchError, match="The record is of another model"), kvpatch.replay(make("gpt2"), again):
        pass


@pytest.mark.parametrize("name", ["llama_gqa", "mpt"])
def test_its_size_beforehand(name):
    model = make(name)
    with kvpatch.patched(model, "h2o", 8, record=True) as patch:
        model.generate(prompt(3, 12), max_new_tokens=5, do_sample=False)
        record = patch.record()
        report = patch.report()  # columns are allocated ahead
        assert record.nbytes <= report.record_nbytes == report.to_dict()["record_nbytes"] <= 3 * record.nbytes
        assert re.search(r"^record +[\d.,]+ (B|KiB)$", str(report), re.M)
        assert patch.record_nbytes(texts=3, tokens=record.ids.shape[1]) == record.nbytes > 0
        for bad, unit in (({"texts": 0, "tokens": 5}, "rows"), ({"texts": 2, "tokens": 1.5}, "tokens of the longest text")):
            with pytest.raises(KVPatchError, match=f"must be a number of {unit}, at least 1"):
                patch.record_nbytes(**bad)


def early(about, tensors):
    tensors["1.deaths"][1, 0, 9] = 9


def late(about, tensors):
    tensors["0.deaths"][0, 1, 3] = 29


def gap(about, tensors):
    tensors["ids"][1, 4] = -1


BAD = [
    (lambda about, t: about.update(format="kvpatch record 0"), "not of this version of kvpatch"),
    (lambda about, t: about.update(layers=0), "names no model, or no layers"),
    (lambda about, t: about.update(layers=3), "where ids and the deaths of 3 layers belong"),
    (lambda about, t: about.update(more=1), "its description has"),
    (lambda about, t: t.update(more=torch.zeros(2)), "it holds 0.deaths, 1.deaths, ids, more where ids and"),
    (lambda about, t: t.update(ids=t["ids"].int()), "ids is torch.int32 .2, 28. where torch.int64 .N, T. belongs"),
    (lambda about, t: t.update({"0.deaths": t["0.deaths"][..., 1:].clone()}), "0.deaths is torch.int32 .2, 2, 27. where"),
    (early, "in layer 1 a token dies before its own query"), (late, "in layer 0 a token dies"), (gap, "its ids have a"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "says"), BAD, ids=[says for _, says in BAD])
def test_a_file_that_is_none(path, change, says):
    rewritten(path, change)
    with pytest.raises(KVPatchError, match=f"no valid record: .*{says}.*Record the rollout anew"):
        kvpatch.load_record(path)


def test_an_altered_file_none_and_no_record(path, tmp_path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(KVPatchError, match="its checksum does not match, so it was altered"):
        kvpatch.load_record(path)
    path.write_bytes(content[:40])
    with pytest.raises(KVPatchError, match="truncated or no such file"):
        kvpatch.load_record(path)
    with pytest.raises(KVPatchError, match="There is no file .*save_record"):
        kvpatch.load_record(tmp_path / "none")
    with pytest.raises(KVPatchError, match="path=3 is no path"):
        kvpatch.load_record(3)
    with pytest.raises(KVPatchError, match=r"save_record\(\) takes a record, not 'x'"):
        kvpatch.save_record("x", path)
    with pytest.raises(KVPatchError, match="The record was not saved to"):
        kvpatch.save_record(kvpatch.Record(torch.zeros(1, 1).long(), (), {}), tmp_path)
