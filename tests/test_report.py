"""The report's numbers against counting by hand, and its pictures."""

import builtins
import json
import warnings

import pytest
import torch

import kvpatch
from kvpatch import plotting, report_text
from kvpatch.report import Report
from kvpatch.report_text import block
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


def test_peak_by_hand(window):
    """While the last layer is compressed: the first one's slots, the prompt's 2 x 20 tokens, and slots for what is kept."""
    assert window.peak_nbytes == ((11 + 7) + 2 * 20 + (6 + 4)) * 2 * 2 * 8 * 4
    model = tiny.make("llama_gqa")
    with kvpatch.patched(model, "window", 8, block=4) as patch, torch.no_grad():
        model(tiny.prompt(1, 40))
    # a budget of 8 and a block of 4 in each of two layers; never the 40 tokens of one layer
    assert patch.report().peak_nbytes < 40 * 2 * 2 * 8 * 4


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


@pytest.mark.parametrize("name", ["mpt", "mistral_sliding"])
def test_positions_that_count_padding_are_places_of_the_text(name):
    """Tokens after the padding had positions beyond the text, and were drawn over its first tokens."""
    model, ids, mask = tiny.make(name), tiny.prompt(2, 10), torch.ones(2, 10, dtype=torch.long)
    mask[0, 6:] = 0
    with kvpatch.patched(model, "full", 1.0) as patch, torch.no_grad():
        cache = patch.new_cache()
        model(ids, attention_mask=mask, past_key_values=cache)
        model(ids[:, :3], attention_mask=torch.cat([mask, torch.ones_like(mask[:, :3])], 1), past_key_values=cache)
        report = patch.report()
    assert report.lengths == (9, 13) and int(report.positions[0][0].max()) == 12
    for row, n in enumerate(report.lengths):
        kept, held = report.kept(row), report.held()[:, row]
        assert torch.equal(kept.sum(-1), held) and all(kept[layer, :, n - held[layer, 0] :].all() for layer in range(2))


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


def test_plot_without_a_path_returns_the_figure(window):
    from matplotlib.figure import Figure

    for what in ("kept", "budgets"):
        figure = window.plot(what=what)
        assert isinstance(figure, Figure)
        assert figure._repr_png_().startswith(b"\x89PNG")  # a notebook shows it


def test_a_notebook_shows_table_and_picture(window, monkeypatch):
    page = window._repr_html_()
    assert "<th style='text-align:left'>budget</th>" in page and "data:image/png;base64,iVBOR" in page
    monkeypatch.setattr(plotting, "new_figure", _raise)
    page = window._repr_html_()
    assert page.startswith("<table>") and "<img" not in page
    mine = Report("<b>mine</b>", "both", (2,), "torch", 0, 0, 0, [])
    assert "&lt;b&gt;mine&lt;/b&gt;" in mine._repr_html_() and "<img" not in mine._repr_html_()


def _raise(**_):
    raise kvpatch.KVPatchError("Pictures need matplotlib")


def test_reprs_are_one_line(window):
    budget = "layer by layer: 0.5 of the prompt, 0.25 of the prompt"
    assert repr(window) == f"<Report: window, {budget}; 3.50 KiB of 12 KiB in full (29%)>"
    with kvpatch.patched(tiny.make("llama"), "h2o", 1, block=4) as patch:
        assert repr(patch) == "<Patch of LlamaModel: h2o, 1 token, block=4>"


@pytest.mark.parametrize(
    ("policy", "k", "words"),
    [
        ("full", 0.5, ["full (never evicts)", "all tokens"]),
        ("h2o", 1.0, ["h2o (never evicts)", "all tokens"]),
        ("h2o", 1, ["h2o (evicts after the prompt and while generating)", " 1 token\n"]),
        ("snapkv", 9, ["snapkv (evicts after the prompt)", " 9 tokens\n"]),
    ],
)
def test_words(policy, k, words):
    model = tiny.make("llama_gqa")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of k=1
        block = kvpatch.patched(model, policy, k)
    with block as patch:
        model.generate(tiny.prompt(1, 12), max_new_tokens=3, pad_token_id=0)
    said = str(patch.report())
    assert all(one in said for one in words)
    assert "attention by          torch" in said and "GPU" not in said and "CUDA" not in said
    never = policy == "full" or isinstance(k, float)
    assert ("in full (100%), and " in said and "in free slots for coming tokens" in said) == never
    assert ("the budget acted in all" in said) != never


def test_bytes_in_words():
    sizes = {0: "0 B", 1023: "1,023 B", 1024: "1 KiB", 3584: "3.50 KiB", 1_155_072: "1.10 MiB", 654 * 2**20: "654 MiB"}
    assert {count: report_text.format_size(count) for count in sizes} == sizes
    assert report_text.format_size(16 * 2**30 + 2**29) == "16.5 GiB"


def test_backends_that_differ_are_told():
    own = "triton: a score of your own"
    ran = {"prompt": ("flash", "FlashAttention 2"), "decode": ("triton", ""), "statistics": ("torch", own)}
    want = ["flash for prompt (FlashAttention 2)", "triton for decode", f"torch for statistics ({own})"]
    assert report_text.list_backends(ran) == want
    assert report_text.list_backends({"prompt": ("torch", "asked for"), "decode": ("torch", "asked for")}) == [
        "torch (asked for)"
    ]


def test_times_of_a_generate():
    model = tiny.make("llama_gqa")
    with kvpatch.patched(model, "h2o", 0.5) as patch:
        model.generate(tiny.prompt(1, 12), max_new_tokens=4, do_sample=False, pad_token_id=0)
        seconds = patch.report().seconds
        assert seconds["total"] == pytest.approx(seconds["first_token"] + 3 * seconds["per_token"])
        assert " to the first token, " in str(patch.report()) and " for each further one" in str(patch.report())
        with torch.no_grad():
            model(tiny.prompt(1, 12))
        assert patch.report().seconds == {} and "first token" not in str(patch.report())
