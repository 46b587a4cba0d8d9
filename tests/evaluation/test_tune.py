"""The search of `kvpatch tune`: on made-up losses whose best setting is known, and on a tiny model."""

import pytest
import torch

import kvpatch
from kvpatch import KVPatchError
from kvpatch.evaluation import tune as tuning
from kvpatch.evaluation.divergence import Comparison
from kvpatch.evaluation.tune import GRID, Quality, Search, cut, tune
from kvpatch.storage.profile import load_profile, save_profile
from tests.helpers.tiny import make, prompt

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture(scope="module")
def model():
    return make("llama_gqa", dtype=torch.float64)


@pytest.fixture
def search(model, monkeypatch):
    """A search whose measurements are a function of policy and k, and which lists them."""

    def made(loss, tolerance=0.05):
        asked = []

        def quality(comparisons, policy, k):
            sizes = k if isinstance(k, tuple) else (k, k)
            asked.append((policy, k))
            return Quality(loss(policy, sizes), sum(sizes) / 2)

        monkeypatch.setattr(tuning, "quality", quality)
        one = Search(model, [(prompt(1, 14), 10)], tolerance)
        one.asked = asked
        return one

    return made


def policies(*names):
    return {name: kvpatch.get_policy(name) for name in names}


def slopes(first, second):
    return lambda policy, k: max(0, first - k[0]) + max(0, second - k[1])


def test_tokens_go_to_the_layer_that_needs_them(search):
    """The first layer needs 0.8, the second 0.2; alike they would need 0.775."""
    one = search(slopes(0.8, 0.2))
    best = one.run(policies("h2o"))
    assert one._uniform("h2o", kvpatch.get_policy("h2o")).k == (0.775, 0.775)
    assert best.quality.kl <= 0.05 and best.quality.share < 0.65
    assert best.k[0] > 0.75 > 0.6 > best.k[1]


@pytest.mark.parametrize("tolerance", [0.01, 0.1, 0.4])
@pytest.mark.parametrize("needs", [(0.8, 0.2), (0.2, 0.8), (0.5, 0.5), (0.3, 0.9)])
def test_no_more_bytes_than_alike_and_never_above_the_tolerance(search, needs, tolerance):
    one = search(slopes(*needs), tolerance)
    best = one.run(chosen := policies("h2o", "roco", "snapkv"))
    alike = min(one._uniform(name, policy).quality.share for name, policy in chosen.items())
    assert best.quality.kl <= tolerance and best.quality.share <= alike + 1e-9
    assert len(one.asked) <= one.most(len(chosen))
    again = search(slopes(*needs), tolerance).run(chosen)
    assert again == best, "it has no chance in it"


def test_the_policy_with_the_fewest_bytes(search):
    one = search(lambda policy, k: max(0, (0.5 if policy.name == "roco" else 0.9) - min(k)))
    assert one.run(policies("h2o", "roco", "tova")).name == "roco"


def test_floors_and_windows(search):
    def loss(policy, k):
        options = policy.options()
        return max(0, 0.1 + abs(options.get("floor", 1) - 0.5) + options["window"] / 100 - min(k))

    best = search(loss).run(policies("snapkv"))
    assert (best.name, best.policy.options()["floor"], best.policy.options()["window"]) == ("adaptive(snapkv)", 0.5, 8)
    assert search(loss).run(policies("adakv")).policy.options()["floor"] == 0.5


def test_the_least_of_the_grid_is_tried(search):
    assert search(lambda policy, k: 0.0)._uniform("h2o", kvpatch.get_policy("h2o")).k == (GRID[0],) * 2


def test_whichever_budget_is_the_least_is_found(search):
    """By bisection: of 38 budgets in no more measurements than 2**6 would take."""
    needed = GRID[0]
    one, policy = search(lambda policy, k: 0.1 * (k[0] < needed)), kvpatch.get_policy("h2o")
    for needed in GRID:
        before = len(one.asked)
        assert one._uniform(f"h2o for {needed}", policy).k == (needed,) * 2
        assert len(one.asked) - before <= 6


@pytest.mark.parametrize(("needed", "least"), [(0.3, 0.4), (0.4, 0.4), (0.55, 0.55), (0.79, 0.79), (0.795, 0.8)])
def test_all_layers_shrink_by_eightieths_to_a_half_at_most(search, needed, least):
    one = search(lambda policy, k: needed - k[0], tolerance=0.0)
    start = tuning.Setting("h2o", kvpatch.get_policy("h2o"), (0.8, 0.4), Quality(0.0, 0.6))
    assert one._shrunk(start).k == (least, least / 2)


def test_bands_of_unequal_sizes_exchange_as_many_tokens(search):
    one = search(lambda policy, k: 0.0)
    one.layers, one.bands = 3, [range(2), range(2, 3)]
    start = tuning.Setting("h2o", kvpatch.get_policy("h2o"), (0.5,) * 3, Quality(1.0, 0.75))
    moved = one._moved_by(start, 0.1).k
    assert moved != start.k and sum(moved) == pytest.approx(1.5)


def test_one_number_where_the_policy_divides_it(search):
    for name in ("pyramidkv", "layer_defensive"):
        one = search(lambda policy, k: 0.6 - k[0])
        best = one.run(policies(name))
        assert isinstance(best.size, float) and 0.5 <= best.size <= 0.6
        assert all(isinstance(k, float) for _, k in one.asked)


def test_refused_policies_are_left_out(search):
    def loss(policy, k):
        if policy.name == "h2o":
            raise KVPatchError("not on this model")
        return 0.0

    one = search(loss)
    assert one.run(policies("h2o", "roco")).name == "roco"
    assert one.refused["h2o"] == "not on this model"
    with pytest.raises(KVPatchError, match=r"None of h2o stays within .* 0.05 .* larger --tolerance.* h2o: not on this model"):
        search(loss).run(policies("h2o"))
    with pytest.raises(KVPatchError, match=f"at k={GRID[-1]}"):
        search(lambda policy, k: 1.0).run(policies("roco", "tova"))


@pytest.mark.parametrize(("tokens", "most", "count"), [(100, 4, 4), (100, 20, 8), (12, 3, 1), (11, 3, 0)])
def test_pieces_do_not_overlap(tokens, most, count):
    ids = torch.arange(tokens)[None]
    pieces = cut(ids, 8, 4, most)
    assert [n for _, n in pieces] == [8] * count and all(piece.shape == (1, 12) for piece, _ in pieces)
    every = torch.cat([piece[0] for piece, _ in pieces]).tolist() if pieces else []
    assert len(set(every)) == len(every) == 12 * count
    assert not pieces or (every[0] == 0 and (count == 1 or every[-1] == tokens - 1))


def test_pieces_begin_alike():
    pieces = cut(torch.arange(5, 30)[None], 8, 4, 2, [1])
    assert [piece[0, :2].tolist() for piece, _ in pieces] == [[1, 5], [1, 19]]
    assert all(piece.shape == (1, 12) for piece, _ in pieces)


def test_on_a_model(model, monkeypatch, tmp_path):
    """What the profile says is what its setting has; patched(profile=) keeps what policy and k keep."""
    monkeypatch.setattr(tuning, "GRID", (0.25, 0.5, 0.75))
    monkeypatch.setattr(tuning, "STEPS", (0.4,))
    pieces, unseen = [(prompt(1, 20, seed=1), 16)], [(prompt(1, 20, seed=2), 16)]
    full = Comparison(model, *pieces[0])
    tolerance = full.figures(kvpatch.get_policy("h2o"), 0.5).kl
    names = []
    search = Search(model, pieces, tolerance, names.append)
    profile = tune(search, policies("h2o", "window"), unseen)
    assert set(names) >= {"h2o", "window"} and len(names) <= search.most(2)
    policy = kvpatch.get_policy(profile.policy).with_options(**profile.options)
    figures = full.figures(policy, profile.k)
    assert profile.measured == {
        "tokens": 20, "pieces": 1, "tolerance": tolerance, "kl": figures.kl, "share": figures.nbytes / full.nbytes,
        "unseen_kl": Comparison(model, *unseen[0]).figures(policy, profile.k).kl,
    }  # fmt: skip
    assert figures.kl <= tolerance and figures.nbytes <= full.figures(kvpatch.get_policy("h2o"), 0.5).nbytes
    save_profile(profile, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == profile
    held = []
    for given in ({"profile": tmp_path / "profile.json"}, {"policy": policy, "k": profile.k}):
        with kvpatch.patched(model, **given) as patch:
            model(prompt(1, 20, seed=3), past_key_values=patch.new_cache())
            held.append(patch.report().held())
    assert torch.equal(*held)
