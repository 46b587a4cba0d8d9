"""Scores of long generations beside what may happen to a text: tokens taken back, rows moved, a file, pieces, other numbers."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvpatch
from kvpatch import KVPatchError
from kvpatch.policies import Policy, Scope, decoding, scores
from kvpatch.policies.needs import Held, LastQueries, PlainKeys, WindowAttention
from kvpatch.policies.needs.last_queries import NewestQueries
from tests.helpers.comparing import DECODING, SMALL_STEPS, certain
from tests.helpers.contexts import small_context
from tests.helpers.running import go_on, kept, steps
from tests.helpers.tiny import force, left_pad, make, prompt, sound

pytestmark = pytest.mark.usefixtures("no_gradients")
K = {"raas": 4, "lazy": 5, "r_kv": 9, "vase": 9}
RECALLING = tuple(name for name in DECODING if kvpatch.get_policy(name).needs.find(LastQueries))


def patched(model, policy):
    return kvpatch.patched(model, policy, K[policy], **SMALL_STEPS[policy])


@pytest.fixture(scope="module")
def model():
    return make("llama_gqa", dtype=torch.float64)


@pytest.mark.parametrize("policy", DECODING)
def test_rolling_back_restores_everything(model, policy):
    ids, fed = prompt(2, 20), prompt(2, 18, seed=2)
    with patched(model, policy) as patch:
        want, plain = force(model, ids, fed)
        cache = patch.new_cache()
        force(model, ids, fed[:, :8], cache=cache)
        cache.activate_past_recording()
        go_on(model, prompt(2, 7, seed=9), cache)
        cache.crop(-7)
        sound(cache)
        logits, _ = go_on(model, fed[:, 8:], cache)
    torch.testing.assert_close(want[:, 9:], logits, atol=0, rtol=0)
    assert kept(plain) == kept(cache)


@pytest.mark.parametrize("policy", DECODING)
def test_beams(model, policy):
    """Beams of a row are rows: with one beam each, what is generated alone is generated in a batch."""
    ids = prompt(2, 18)
    mask = left_pad(ids, [18, 12])
    with patched(model, policy):
        both = model.generate(ids, attention_mask=mask, num_beams=3, max_new_tokens=14, do_sample=False, pad_token_id=0)
        for row, n in enumerate((18, 12)):
            alone = model.generate(ids[row : row + 1, 18 - n :], num_beams=3, max_new_tokens=14, do_sample=False)
            assert both[row, 18:].tolist() == alone[0, n:].tolist()


OTHERWISE = [
    ("r_kv", {"block": 7}), ("vase", {"block": 7}), ("r_kv", {"positions": "renumbered"}),
    ("vase", {"positions": "renumbered"}), ("r_kv", {"bits": 8}), ("vase", {"bits": 4}),
    ("raas", {"positions": "renumbered"}), ("vase", {"sinks": 3, "ranges": 1}),
    ("r_kv", {"window": 30}), ("vase", {"window": 40, "pooling": None}), ("lazy", {"recent": 0}), ("r_kv", {"pooling": None}),
]  # fmt: skip


@pytest.mark.parametrize(("policy", "more"), OTHERWISE, ids=[f"{policy}-{more}" for policy, more in OTHERWISE])
def test_as_the_oracle_has_it(policy, more):
    for name in ("llama_gqa", "mpt") if "positions" in more else ("llama_gqa",):
        certain(name, policy, K[policy], steps=14, **SMALL_STEPS[policy] | more)


@pytest.mark.parametrize("policy", RECALLING)
def test_the_last_queries_see_a_sliding_window_alone(policy):
    certain("mistral_sliding", policy, K[policy], steps=14, **SMALL_STEPS[policy])


@pytest.mark.parametrize("policy", DECODING)
def test_float32(policy):
    certain("llama_gqa", policy, K[policy], steps=14, dtype=torch.float32, **SMALL_STEPS[policy])


def test_a_later_prompt_goes_on_with_the_last_queries(model):
    """Shorter than the window: its first queries are those of the turn before."""
    for policy in RECALLING:
        with patched(model, policy) as patch:
            cache = patch.new_cache()
            force(model, prompt(1, 15), prompt(1, 6, seed=3), cache=cache)
            model(prompt(1, 2, seed=5), past_key_values=cache)
            sound(cache)
            assert sorted(cache.layers[0].need_notes["recent"].positions_BW[0].tolist()) == [20, 21, 22]
            go_on(model, prompt(1, 9, seed=6), cache)
            assert cache.held(0).max() <= 11


def test_recent_queries_by_hand():
    """Positions 0 to 6 in three columns, the second row padded by two; then one query, which is taken back."""
    q = torch.arange(14.0).view(2, 1, 1, 7, 1)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [-1, -1, 0, 1, 2, 3, 4]])
    empty = NewestQueries.make_empty(3, q, torch.float32)
    whole = empty.read(q, positions)
    assert whole.positions_BW.tolist() == [[6, 4, 5], [3, 4, 2]]
    assert whole.q_BHGWD.flatten(1).tolist() == [[6, 4, 5], [12, 13, 11]]
    few = NewestQueries.make_empty(3, q[:1], torch.float32).read(q[:1, :, :, :4], torch.tensor([[-1, -1, 0, 1]]))
    assert few.positions_BW.tolist() == [[0, 1, -1]] and few.q_BHGWD.flatten().tolist()[:2] == [2, 3]
    pieces = empty.read(q[:, :, :, :3], positions[:, :3]).read(q[:, :, :, 3:], positions[:, 3:])
    assert torch.equal(pieces.q_BHGWD, whole.q_BHGWD) and torch.equal(pieces.positions_BW, whole.positions_BW)
    before = whole.q_BHGWD.clone()
    at = torch.tensor([[7], [5]])
    undo = whole.overwritten_by(at)
    whole.restore((at % 3, torch.tensor([70.0, 50.0]).view(2, 1, 1, 1, 1), at))
    assert whole.positions_BW.tolist() == [[6, 7, 5], [3, 4, 5]]
    assert whole.q_BHGWD.flatten(1).tolist() == [[6, 70, 5], [12, 13, 50]]
    whole.restore(undo)
    assert torch.equal(whole.q_BHGWD, before) and whole.positions_BW.tolist() == [[6, 4, 5], [3, 4, 2]]


def test_what_is_said_again():
    """R-KV: of three equal keys the oldest is the most redundant and the newest the least; alike=None tells none apart."""
    keys = torch.eye(6)[None, None].clone()
    keys[0, 0, 2:5] = keys[0, 0, 2]
    positions, order = torch.arange(6)[None, None], torch.tensor([3, 0, 5, 4, 1, 2])  # slots are in no order
    for alike in (0.5, None):
        score = kvpatch.get_policy("r_kv").with_options(alike=alike).score
        held = keys[:, :, order]
        context = type("Context", (), {"positions_BHT": positions[..., order], "view": lambda self, kind, k=held: (k, k)})()
        likeness = dict(zip(order.tolist(), score._find_redundancy(context)[0, 0].tolist(), strict=True))
        assert sum(likeness.values()) == pytest.approx(1.0)
        if alike is None:
            assert likeness[2] == likeness[3] == likeness[4] > likeness[0] == likeness[5]
        else:
            assert likeness[2] > likeness[3] > likeness[4] == likeness[0]


BAD = [
    ("raas", {"alpha": 1.0}, r"alpha=1.0 must be in \[0, 1\)"), ("r_kv", {"weight": -0.1}, "weight=-0.1 must be in"),
    ("r_kv", {"alike": 3}, "alike=3 must be a cosine"), ("r_kv", {"window": 0}, "window=0"),
    ("vase", {"kernel": 4}, "kernel=4"),
    ("vase", {"ranges": 1.5}, "ranges=1.5 is more than the whole budget"), ("vase", {"pooling": "min"}, "pooling='min'"),
    ("r_kv", {"schedule": "prompt"}, "'r_kv' is made for decode steps.*use schedule='decode' or 'both'"),
    ("tri_attention", {"schedule": "prompt"}, "'tri_attention' is made for decode steps.*use schedule='decode' or 'both'"),
    ("raas", {"schedule": "both"}, "'raas' scores tokens by what decode steps attend to.*use schedule='decode'"),
]  # fmt: skip


@pytest.mark.parametrize(("policy", "options", "says"), BAD, ids=str)
def test_options_out_of_range(model, policy, options, says):
    with pytest.raises(KVPatchError, match=says):
        kvpatch.patch(model, policy, 4, **options)


def test_what_a_score_has_not_declared():
    for kind in (LastQueries, Held, PlainKeys):
        with pytest.raises(KVPatchError, match=rf"context.view\({kind.__name__}\) is there if .* needs = \({kind.__name__}"):
            small_context(1, None).view(kind)


class Former(scores.Accumulated):
    statistics = ("sum",)


class Bare(scores.Accumulated):
    needs = Held()


def test_needs_of_another_kind_are_refused():
    with pytest.raises(KVPatchError, match=r'Former.statistics: .* as needs: needs = \(Sums\("cubes"\),\)'):
        Policy("mine", Former())
    with pytest.raises(KVPatchError, match="Bare.needs is Held.*must be a tuple"):
        Policy("mine", Bare())

    class Wide(Scope):
        needs = (WindowAttention(3),)

    with pytest.raises(KVPatchError, match="score and scope need .*width=1.* and .*width=3"):
        Policy("mine", scores.Last(), Wide())


def test_a_waiting_step_scores_nothing(model, monkeypatch):
    """With every=m only each m-th step looks at the last queries."""
    for policy in RECALLING:
        score, calls = type(kvpatch.get_policy(policy).score), []
        value = score.value
        monkeypatch.setattr(score, "value", lambda self, context, v=value, c=calls: c.append(1) or v(self, context))
        with patched(model, policy):
            force(model, prompt(1, 20), prompt(1, 12, seed=2))
        assert len(calls) == 2 * (1 + 4), "two layers: at the prompt's end, and at every third of twelve steps"


@pytest.mark.parametrize("policy", ["raas", *RECALLING])
def test_a_compiled_step_computes_the_same(policy):
    one = kvpatch.get_policy(policy).with_options(**SMALL_STEPS[policy] | {"every": 1})
    model, ids, fed = make("llama_gqa"), prompt(2, 24), prompt(2, 5, seed=2)
    want, held = steps(model, one, ids, fed, backend="torch")
    got, same = steps(model, one, ids, fed, backend="torch", compiled=True)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    assert torch.equal(held[0], same[0])


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "bmm" in str(func)
        return func(*args, **kwargs or {})


def test_cosines_are_held_in_blocks(monkeypatch):
    """Blocks change no number; a device's are larger, so that 32,768 tokens take 128 of them in a layer, not 512."""
    rng = torch.Generator().manual_seed(0)
    unit = torch.nn.functional.normalize(torch.randn(2, 3, 50, 8, generator=rng), dim=-1)
    positions = torch.arange(50).expand(2, 3, -1)
    whole = decoding._sum_last_repeats(unit, positions, 0.3)
    monkeypatch.setattr(decoding, "_ON_CPU", 2 * 3 * 50 * 7)
    with Products() as blocks:
        torch.testing.assert_close(decoding._sum_last_repeats(unit, positions, 0.3), whole)
    assert blocks.count == 8
    with Products() as blocks:
        decoding._sum_last_repeats(torch.empty(1, 8, 32768, 4, device="meta"), torch.empty(1, 8, 32768, device="meta"), 0.3)
    assert blocks.count == 128
