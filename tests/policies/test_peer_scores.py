"""Scores and kept tokens are those of NVIDIA kvpress' own code, as `make peer-scores` wrote them down."""

import json
from pathlib import Path

import pytest
import torch

import kvpatch
from kvpatch.attention import compress
from kvpatch.hooks.target import Target
from kvpatch.policies import content
from kvpatch.policies.calibration import Calibration
from tools.peer_presses import PRESSES, counts
from tools.reliability.peer_scores import AREAS, CASES, RATIO, RECENT, SINKS, TABLE, TOKENS, sketch, small_model, text

PEER = json.loads(TABLE.read_text())


def test_the_table_names_every_press_and_builds_what_it_says():
    assert sorted(PRESSES) == [name for name in PEER["presses"] if name not in ("BasePress", "ScorerPress")]
    policies = {press.row for press in PRESSES.values() if press.row}
    assert policies <= set(kvpatch.list_policies())
    assert all(press.note for press in PRESSES.values() if not press.row)
    for press in PRESSES.values():
        if press.call:
            eval(f"kvpatch.patch(small_model(), {press.call})").remove()


def test_the_readme_counts_the_presses():
    rows, options, _ = counts()
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert f"{rows} of the {len(PRESSES)} presses" in readme and f"{options} more" in readme


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.mark.parametrize("case", CASES)
def test_scores_and_kept_tokens_are_the_peer_s(case, model, monkeypatch):
    policy, options, _, _ = CASES[case]
    mine, theirs = [], [torch.tensor(layer, dtype=torch.float64) for layer in PEER[case]["scores"]]
    monkeypatch.setattr(
        content.Leverage, "_sketch_keys", lambda score, _, H, D: sketch((H, D, score.sketch)) / score.sketch**0.5
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
