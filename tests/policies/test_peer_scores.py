"""Scores and kept tokens are those of NVIDIA kvpress' own code, as `make peer-scores` wrote them down."""

import json
import re
from pathlib import Path

import pytest
import torch

import kvpatch
from kvpatch.attention import compress
from kvpatch.hooks.target import Target
from kvpatch.policies import content
from kvpatch.policies.calibration import Calibration
from tests.policies.peer_scores import AREAS, CASES, RATIO, RECENT, SINKS, TABLE, TOKENS, sketch, small_model, text

PEER = json.loads(TABLE.read_text())
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/peers.md").read_text(encoding="utf-8")
PRESSES = {name: (here, note) for name, here, note in re.findall(r"^\| `(\w+)` \| (.+?) \| (.*) \|$", PAGE, re.MULTILINE)}
ROWS = [here for here, _ in PRESSES.values() if here.startswith("row")]
CALLS = [here.removeprefix("option `").removesuffix("`") for here, _ in PRESSES.values() if here.startswith("option")]


def test_the_page_names_every_press_in_order():
    assert sorted(PRESSES) == [name for name in PEER["presses"] if name not in ("BasePress", "ScorerPress")]
    assert list(PRESSES) == sorted(PRESSES, key=str.lower)
    assert all(note or here in ROWS for here, note in PRESSES.values()), "an option or a gap is explained"


@pytest.mark.parametrize("row", ROWS)
def test_a_row_of_the_page_is_a_policy(row):
    assert row in [f"row [{name}](policies/{name}.md)" for name in kvpatch.list_policies()]


@pytest.mark.parametrize("call", CALLS)
def test_an_option_of_the_page_patches_a_model(call):
    eval(f"kvpatch.patch(small_model(), {call})").remove()


def test_the_readme_and_the_page_count_the_presses():
    none, total = len(PRESSES) - len(ROWS) - len(CALLS), len(PRESSES)
    readme = (ROOT / "README.md").read_text()
    assert f"{len(ROWS)} of the {total} presses are policies here, {len(CALLS)} more are options" in readme
    assert f"Of its {total} presses {len(ROWS)} are policies here, {len(CALLS)} are options, and {none} have nothing" in PAGE


def test_the_page_names_the_presses_that_are_compared():
    compared = dict.fromkeys(f"`{press}`" for _, _, press, _ in CASES.values() if press != "DropKV")
    assert f"by a\ntest:\n\n{', '.join(compared)}\n" in PAGE


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.mark.parametrize("case", CASES)
def test_scores_and_kept_tokens_are_the_peer_s(case, model, monkeypatch):
    policy, options, _, _ = CASES[case]
    mine, theirs = [], [torch.tensor(layer, dtype=torch.float64) for layer in PEER[case]["scores"]]
    monkeypatch.setattr(
        content.Leverage, "_draw_sketch", lambda score, _, H, D: sketch((H, D, score.sketch)) / score.sketch**0.5
    )
    monkeypatch.setattr(compress, "_warn_of_scores", lambda call, value: mine.append(value[0].clone()))
    with torch.no_grad(), kvpatch.patched(model, policy, 1 - RATIO, **options) as patch:
        cache = patch.new_cache()
        model(text(), past_key_values=cache)
    chosen = kvpatch.get_policy(policy).with_options(**options)  # a press gives what it protects a score above all others
    sinks, window = chosen.scope.sinks, chosen.scope.recent
    if chosen.needs.protects:
        window = chosen.needs.protects
    for layer, (own, peer) in enumerate(zip(mine, theirs, strict=True)):
        for head, scores in enumerate(peer):
            places = cache.positions(layer)[0, head]
            places, wanted = places[places >= 0].sort().values, torch.tensor(PEER[case]["kept"][layer][head])
            # of equal scores a press keeps any
            assert torch.equal(places, wanted) or policy in ("lag_kv", "key_norm")
            torch.testing.assert_close(scores[places].sort().values, scores[wanted].sort().values, atol=1e-7, rtol=1e-7)
            if "values" in PEER[case]:
                sizes = cache.layers[layer].values[0, head, : len(places)].norm(dim=-1)
                sizes = sizes[cache.positions(layer)[0, head, : len(places)].argsort()]
                wanted = torch.tensor(PEER[case]["values"][layer][head], dtype=sizes.dtype)
                torch.testing.assert_close(sizes, wanted, atol=1e-5, rtol=1e-5)  # a press merges in float32
        own, peer = own[:, sinks : TOKENS - window], peer[:, sinks : TOKENS - window]
        if policy == "cur":  # a press divides by the sum of the head, sinks included
            own, peer = own / own.sum(-1, keepdim=True), peer / peer.sum(-1, keepdim=True)
        if policy == "leverage":  # a press standardizes over all heads
            own = (own - own.mean()) / own.std()
        torch.testing.assert_close(own, peer, atol=1e-5, rtol=1e-5)


def test_heads_that_stream_keep_the_peer_s_tokens(model):
    layers = {layer: {"area": torch.tensor(areas)} for layer, areas in enumerate(AREAS)}
    calibration = Calibration(Target.find(model).identity(), layers, 1, "")
    with torch.no_grad(), kvpatch.patched(model, "duo", RATIO, calibration=calibration, sinks=SINKS, recent=RECENT) as patch:
        cache = patch.new_cache()
        model(text(), past_key_values=cache)
    for layer, heads in enumerate(PEER["duo"]["kept"]):
        for head, wanted in enumerate(heads):
            places = cache.positions(layer)[0, head]
            assert places[places >= 0].sort().values.tolist() == wanted
