"""The report's numbers against counting by hand, and its pictures."""

import builtins
import json

import pytest
import torch

import kvpatch
from kvpatch.report import Report, block
from tests.helpers import tiny

LENGTHS = [20, 12]


@pytest.fixture(scope="module")
def window():
    """Under `window` the kept set is known beforehand: the newest tokens of each row."""
    model = tiny.make("llama_gqa")
    ids = tiny.prompt(2, 20)
    with kvpatch.patched(model, "window", k=[0.5, 0.25]) as patch:
        model.generate(ids, attention_mask=tiny.left_pad(ids, LENGTHS), max_new_tokens=5)
    return patch.report()


def test_numbers_by_hand(window):
    # the fifth new token is never fed, so 24 columns were seen, 24 and 16 tokens of the rows' own
    assert (window.seen, window.lengths) == (24, (24, 16))
    assert window.held().tolist() == [[[10, 10], [6, 6]], [[5, 5], [3, 3]]]
    # 2 KV heads, keys and values of 8 float32; each row of a layer holds its budget and one free slot
    token = 2 * 2 * 8 * 4
    assert (window.nbytes, window.full_nbytes) == ((11 + 7 + 6 + 4) * token, 2 * 2 * 24 * token)
    assert window.share == pytest.approx(28 / 96)


def test_kept_are_the_newest(window):
    for row, n in enumerate((24, 16)):
        kept = window.kept(row)
        assert kept.shape == (2, 2, n)
        for layer, share in enumerate((0.5, 0.25)):
            budget = int(share * LENGTHS[row])
            assert kept[layer].tolist() == [[False] * (n - budget) + [True] * budget] * 2


def test_table_and_dict(window):
    text = str(window)
    assert "layer by layer: 0.5 of the prompt, 0.25 of the prompt" in text
    assert "24 columns; the rows' own: 16 to 24" in text
    assert "3 to 10" in text
    assert "6 to 10, 3 to 5" in text
    assert "3.50 KiB of 12 KiB in full (29%)" in text  # 28 and 96 tokens of 128 bytes
    numbers = json.loads(json.dumps(window.to_dict()))
    assert numbers["budget"] == [0.5, 0.25]
    assert numbers["held"][1][0] == [5, 5]
    assert numbers["lengths"] == [24, 16]


@pytest.mark.parametrize(
    ("k", "schedule", "words"),
    [
        (1.0, None, "all tokens"),
        (7, None, "7 tokens"),
        (0.5, "decode", "0.5 of the prompt, counting generated tokens only"),
    ],
)
def test_budget_in_words(k, schedule, words):
    model = tiny.make("llama")
    with kvpatch.patched(model, "h2o", k, schedule=schedule) as patch:
        model.generate(tiny.prompt(1, 12), max_new_tokens=2)
    assert f"budget                {words}\n" in str(patch.report())


def test_strip(window):
    # row 0 in 6 segments of 4 tokens: 10 and 5 newest of 24 are kept
    assert window.strip(0, width=6) == "layer  0 |   ▄██| 42%\nlayer  1 |    ▂█| 21%"
    # a text of 16 tokens gets 16 characters at most
    assert window.strip(1) == f"layer  0 |{' ' * 10}{'█' * 6}| 38%\nlayer  1 |{' ' * 13}{'█' * 3}| 19%"


def test_block_is_blank_for_none_and_full_for_all_only():
    assert [block(share) for share in (0.0, 1e-6, 0.5, 1 - 1e-6, 1.0)] == [" ", "▁", "▄", "▇", "█"]


def test_later_tokens_do_not_change_a_report():
    model = tiny.make("llama")
    with kvpatch.patched(model, "h2o", 0.5) as patch, torch.no_grad():
        cache = model(tiny.prompt(1, 12)).past_key_values
        report = patch.report()
        before = [positions.clone() for positions in report.positions]
        for token in range(4):
            model(torch.tensor([[token]]), past_key_values=cache)
    assert all(torch.equal(a, b) for a, b in zip(before, report.positions, strict=True))
    assert report.seen == 12


def test_plot_writes_a_picture(window, tmp_path):
    window.plot(tmp_path / "kept.png", row=1)
    assert (tmp_path / "kept.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda r, folder: r.plot(folder / "no" / "kept.png"), "no' does not exist"),
        (lambda r, folder: r.plot(folder), "is a folder"),
        (lambda r, folder: r.plot(folder / "kept.nonsense"), "cannot be written"),
        (lambda r, folder: r.plot(folder / "kept.png", row=2), "row=2: the batch has the rows 0 to 1"),
        (lambda r, folder: r.strip(row=-1), "row=-1"),
        (lambda r, folder: r.strip(width=0), "width=0 must be a number of characters"),
    ],
)
def test_errors_in_words(window, tmp_path, call, words):
    with pytest.raises(kvpatch.KVPatchError, match=words):
        call(window, tmp_path)


def test_an_empty_cache():
    with kvpatch.patched(tiny.make("llama"), "h2o", 0.5) as patch:
        report = Report.of(patch.new_cache())
    assert report.seen == 0
    assert "tokens seen" in str(report)
    assert report.share == 1.0
    with pytest.raises(kvpatch.KVPatchError, match="cache is empty"):
        report.strip()


def test_without_matplotlib(window, tmp_path, monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(kvpatch.KVPatchError, match="pip install matplotlib"):
        window.plot(tmp_path / "kept.png")


def test_an_empty_slot_is_no_token():
    report = Report("mine", "both", (2,), "torch", 5, 1, 1, [torch.tensor([[[3, -1, 0]]])], (5,))
    assert report.kept().tolist() == [[[True, False, False, True, False]]]
    assert report.held().tolist() == [[[2]]]


def test_budgets_and_mass():
    """What each head holds as a heat map, and the share of the prompt's attention that fell on what was kept."""
    model, ids = tiny.make("llama_gqa"), tiny.prompt(2, 40)
    with torch.no_grad(), kvpatch.patched(model, "h2o", 10) as patch:
        cache = patch.new_cache()
        model(ids, past_key_values=cache)
        report = patch.report()
    p = torch.stack(_attention(model, ids))  # [L,B,Hq,n,n]
    received = p.sum(3).unflatten(2, (2, 2)).mean(3)  # [L,B,H,n]
    for layer, mass in enumerate(report.mass):
        assert mass.shape == (2, 2)
        for row in range(2):
            kept = report.kept(row)[layer]
            if layer == 0:  # later layers' inputs are the full cache's too: the prompt is attended to exactly
                assert kept.sum(-1).tolist() == [10, 10]
            want = (received[layer, row] * kept).sum(-1) / received[layer, row].sum(-1)
            torch.testing.assert_close(mass[row], want, atol=1e-4, rtol=0)
    assert "attention kept" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["mass"][0][0][0] == pytest.approx(float(report.mass[0][0, 0]))


def test_mass_counts_what_earlier_blocks_evicted():
    model, ids, most = tiny.make("llama_gqa"), tiny.prompt(2, 40), []
    for size in (None, 40, 5):
        with torch.no_grad(), kvpatch.patched(model, "h2o", 10, block=size) as patch:
            cache = patch.new_cache()
            model(ids, past_key_values=cache)
            most.append(torch.stack(patch.report().mass))
    torch.testing.assert_close(most[0], most[1], atol=1e-5, rtol=0)
    # each of the first ten rows spends one on tokens of its own time, most of which are gone at the end
    assert (most[2] > 0).all()
    assert (most[2] < 0.9).all()
    with torch.no_grad(), kvpatch.patched(model, "window", 10, block=5) as patch:
        cache = patch.new_cache()
        model(ids, past_key_values=cache)
        assert patch.report().mass == [None, None]


def _attention(model, ids):
    with torch.no_grad():
        model.set_attn_implementation("eager")
        return model(ids, output_attentions=True).attentions


def test_a_heat_map_of_budgets(tmp_path):
    model, ids = tiny.make("llama_gqa"), tiny.prompt(1, 40)
    with torch.no_grad(), kvpatch.patched(model, "adakv", 12, window=4) as patch:
        cache = patch.new_cache()
        model(ids, past_key_values=cache)
        report = patch.report()
    report.plot(tmp_path / "budgets.png", what="budgets")
    assert (tmp_path / "budgets.png").stat().st_size > 1000
    with pytest.raises(kvpatch.KVPatchError, match=r"what='bugdets' is no picture; give 'kept' or 'budgets'"):
        report.plot(tmp_path / "x.png", what="bugdets")
