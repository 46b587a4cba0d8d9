"""Weights that a second reading taught, the calibration that holds them, and the policy that scores by them."""

import json

import pytest
import torch
from torch import nn

import kvpatch
from kvpatch import KVPatchError
from kvpatch.cli.calibrate_command import _cut_text
from kvpatch.evaluation.calibrate import calibrate, make_teacher
from kvpatch.policies.measures import MEASURES, MORE, Sample
from kvpatch.storage.calibration import save_calibration
from tests.cli.test_cli import folder, run  # noqa: F401
from tests.helpers.comparing import SMALL, calibration, certain
from tests.helpers.tiny import make, prompt
from tests.helpers.tiny_families import make as make_family
from tests.oracle import reference
from tests.oracle.reference_content import learned_features, learned_weights
from tests.oracle.reference_models import decoder_of
from tests.policies.test_calibration import rewritten

pytestmark = pytest.mark.usefixtures("no_gradients")
TEXTS = ((30, 3), (19, 4))  # tokens, seed
SINKS = 4


def learned_of(model):
    return calibration("learned", model, [prompt(1, n, seed=seed) for n, seed in TEXTS])


@pytest.fixture(scope="module")
def model():
    return make("llama_gqa", dtype=torch.float64)


@pytest.fixture(scope="module")
def found(model):
    with torch.no_grad():
        return learned_of(model)


@pytest.fixture
def path(found, tmp_path):
    save_calibration(found, tmp_path / "learned.safetensors")
    return tmp_path / "learned.safetensors"


@pytest.mark.parametrize("name", ["llama_gqa", "gpt2", "mpt", "gptj"])
def test_weights_are_those_of_least_squares(name):
    """Of the oracle's features and second readings, all pieces together, by another way than normal equations."""
    model = make(name, dtype=torch.float64)
    layers, rows, scores = learned_of(model).layers, {}, {}
    for n, seed in TEXTS:
        oracle = reference.Oracle(decoder_of(model), n, 1.0, reference.settings("kvzip_plus", SMALL["kvzip_plus"]), 1, None)
        oracle.forward(prompt(1, n, seed=seed)[0].tolist())
        oracle.read_again(prompt(1, n, seed=seed)[0].tolist())
        for l in range(len(oracle.noted)):
            for g, noted in enumerate(oracle.noted[l]):
                for i in range(SINKS, n):
                    rows.setdefault((l, g), []).append(learned_features(*noted[i], i))
                    scores.setdefault((l, g), []).append(oracle.repeated[l][g][i])
    assert len(rows) == sum(len(own["weight"]) for own in layers.values())
    for (l, g), own in rows.items():
        assert len(own) == sum(n - SINKS for n, _ in TEXTS)
        wanted = learned_weights(own, scores[l, g])
        torch.testing.assert_close(layers[l]["weight"][g].double(), wanted, atol=3e-5 * float(wanted.abs().max()), rtol=0)


def test_a_feature_that_is_always_zero_weighs_nothing():
    x, y = torch.rand(2, 50, 5), torch.rand(2, 50)
    x[1, :, 2] = 0
    measure = MEASURES["weight"]
    weight = measure.finish(measure.add_piece(None, Sample(x_HTF=x, y_HT=y)))
    assert weight[1, 2] == 0 and bool((weight[0] != 0).all())
    others = [0, 1, 3, 4]
    fewer = measure.finish(measure.add_piece(None, Sample(x_HTF=x[..., others], y_HT=y)))
    torch.testing.assert_close(weight[1, others], fewer[1])


CASES = [
    (9, {}), (0.3, {"recent": 3, "floor": 0.0}), (8, {"schedule": "both", "every": 3}), (9, {"bits": 8, "schedule": "both"}),
    ([6, 11], {"turns": "first"}),
]  # fmt: skip


@pytest.mark.parametrize(("k", "more"), CASES, ids=str)
def test_as_the_oracle_has_it(model, found, k, more):
    certain("llama_gqa", "learned", k, steps=12, model=model, calibration=found, **more)


@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3", "phi3"])
def test_values_of_another_size_and_layers_with_a_window(name):
    model = make_family(name, dtype=torch.float64)
    own, ids = learned_of(model), prompt(2, 20, seed=5)
    sizes = {tensor.shape[-1] - MORE for layer in own.layers.values() for tensor in layer.values()}
    mask = torch.ones_like(ids).index_fill(1, torch.arange(6), 0)
    mask[0] = 1
    with kvpatch.patched(model, "learned", 7, calibration=own) as patch:
        cache, alone = patch.new_cache(), patch.new_cache()
        model(ids, attention_mask=mask, past_key_values=cache)
        model(ids[1:, 6:], past_key_values=alone)
        budgeted = [i for i, bound in enumerate(patch.settings.bounds) if bound is None]
        assert sizes == {cache.layers[i].kv.values.shape[-1] for i in budgeted} and sorted(own.layers) == budgeted
        for i in budgeted:
            both = (cache.positions(i)[1], alone.positions(i)[0])
            held = [[sorted(p for p in head if p >= 0) for head in one.tolist()] for one in both]
            assert held[0] == held[1] and held[0] != [sorted(range(14))] * len(held[0])


def test_each_head_by_itself_in_blocks(model, found):
    """Without the shared budget prompts may be read in blocks; scores are fixed, so blocks of one token are decode steps."""
    policy = kvpatch.Policy("mine", kvpatch.get_policy("learned").score).with_options(calibration=found)
    ids, kept = prompt(2, 24, seed=5), []
    for way in ({"block": 1}, {}):
        with kvpatch.patched(model, policy, 7, **way) as patch:
            cache = patch.new_cache()
            if way:
                model(ids, past_key_values=cache)
            else:
                for token in ids.split(1, 1):
                    model(token, past_key_values=cache)
            kept.append([cache.positions(layer).sort(-1).values for layer in range(2)])
    torch.testing.assert_close(kept[0], kept[1])
    assert not torch.equal(kept[0][0], torch.arange(17, 24).expand(2, 2, 7))


def test_the_file_is_a_calibration(model, found, path):
    again = kvpatch.load_calibration(path)
    assert again == found and again.tokens == sum(n for n, _ in TEXTS) and {*again.layers[0]} == {"weight"}
    with kvpatch.patched(model, "learned", 9, calibration=again):
        pass
    with pytest.raises(KVPatchError, match=r"'direction' of layer 0: calibrate this model anew, by `kvpatch calibrate`"):
        kvpatch.patch(model, "q_filter", 9, calibration=again)
    queries = calibrate(model, [prompt(1, 20)])
    with pytest.raises(KVPatchError, match=r"'weight' of layer 0: calibrate this model anew, by `kvpatch learn`"):
        kvpatch.patch(model, "learned", 9, calibration=queries)
    with pytest.raises(KVPatchError, match=r"is of another model: .*Run `kvpatch learn`"):
        kvpatch.patch(make("llama_gqa", dtype=torch.float64, seed=1), "learned", 9, calibration=again)
    with pytest.raises(KVPatchError, match="needs a calibration of this model: run `kvpatch learn"):
        kvpatch.patch(model, "learned", 9)
    with pytest.raises(KVPatchError, match="positions='renumbered' does not go with policy 'learned'"):
        kvpatch.patch(model, "learned", 9, calibration=again, positions="renumbered")
    with pytest.raises(KVPatchError, match="the score of policy 'critical_learned' is no weight"):
        kvpatch.critical("learned")


def wrong(name, tensor):
    def change(about, tensors):
        tensors[name] = tensor

    return change


BAD = [
    (wrong("0.direction", torch.zeros(2, 8)), "of layer 0 it holds direction, weight where .* or weight belong"),
    (wrong("1.weight", torch.zeros(2, 12, dtype=torch.float64)), "1.weight is torch.float64 .2, 12. where torch.float32"),
    (wrong("1.weight", torch.full((2, 12), torch.inf)), "not finite"),
]


@pytest.mark.parametrize(("change", "says"), BAD, ids=[says for _, says in BAD])
def test_a_file_that_is_none(path, change, says):
    rewritten(path, change)
    with pytest.raises(KVPatchError, match=f"no valid calibration: .*{says}"):
        kvpatch.load_calibration(path)


def test_weights_of_another_size(model, path):
    rewritten(path, wrong("1.weight", torch.zeros(2, 11)))
    with pytest.raises(KVPatchError, match=r"has \[2, 11\] for 'weight' of layer 1 where \[2, 12\] belongs"):
        kvpatch.patch(model, "learned", 9, calibration=kvpatch.load_calibration(path))


def test_a_text_of_sinks_alone(model):
    with pytest.raises(KVPatchError, match="The text has 4 tokens, of which 4 are sinks: give a longer one"):
        calibration("learned", model, [prompt(1, 4)])
    assert calibration("learned", model, [prompt(1, 4), prompt(1, 5)]).tokens == 9


def test_a_calibration_has_no_weights(model):
    """Learning adds no statistic to it."""
    assert {*calibrate(model, [prompt(1, 20)]).layers[0]} == {"direction", "area", "mean", "norm", "pairs", "turn"}


def test_a_model_that_is_patched_again_is_as_before(model, found):
    before = model(prompt(1, 12)).logits
    learned_of(model)
    torch.testing.assert_close(model(prompt(1, 12)).logits, before, atol=0, rtol=0)
    assert all(type(module).forward is module.forward.__func__ for module in model.modules() if isinstance(module, nn.Linear))


def test_from_the_command_line(folder, tmp_path):  # noqa: F811
    (tmp_path / "text").write_text("what it reads, and reads again " * 9)
    out = tmp_path / "l.safetensors"
    assert "Give a text after the model" in run("learn", folder, "--out", out).output
    result = run("learn", folder, tmp_path / "text", "--out", out, "--length", 50, "--tokens", 120, "--json")
    assert result.exit_code == 0, result.output
    own = kvpatch.load_calibration(out)
    assert json.loads(result.stdout)["tokens"] == own.tokens <= 120 and {*own.layers[0]} == {"weight"}
    assert run("learn", folder, tmp_path / "text", "--out", out, "--teacher", "kvzip", "--tokens", 50).exit_code == 0
    assert kvpatch.load_calibration(out) != own
    result = run("learn", folder, tmp_path / "text", "--teacher", "snapkv")
    assert "--teacher='snapkv' must be one of kvzip_plus, kvzip" in result.output
    arguments = ("generate", folder, "--prompt", "what it reads", "--max-new-tokens", 3, "--policy", "learned", "-k", 6)
    assert run(*arguments, "-o", f"calibration={out}").exit_code == 0
    assert "run `kvpatch learn" in run(*arguments).output


def test_pieces_fit_twice():
    """A text longer than the model's positions is cut so that a piece and what repeats it fit."""
    model, teacher = make("gpt2"), kvpatch.get_policy("kvzip_plus").with_options(instruction=(3, 1))
    limit, n = model.config.n_positions, 3 * model.config.n_positions
    pieces = _cut_text(model, prompt(1, n), n, teacher.with_options(chunk=n))
    assert all(2 * piece.shape[1] + 2 <= limit for piece in pieces) and pieces[0].shape[1] == (limit - 2) // 2
    assert sum(piece.shape[1] for piece in pieces) == n
    once = _cut_text(model, prompt(1, n), n, None)
    assert [piece.shape[1] for piece in once] == [limit] * 3, "every token is read"
    assert calibrate(model, pieces, teacher=teacher.with_options(chunk=n)).tokens == n
    model.config.n_positions = model.config.max_position_embeddings = 9
    with pytest.raises(KVPatchError, match="9 positions, too few to read a text twice"):
        _cut_text(model, prompt(1, n), n, teacher)


class Words:
    chat_template = None

    def encode(self, text, add_special_tokens):
        return [len(text)]


def test_the_teacher_repeats_a_whole_piece():
    policy = make_teacher(Words(), 64)
    assert policy.score.chunk == 64 and len(policy.score.instruction) == 3 and policy.name == "kvzip_plus"
    assert make_teacher(Words(), 64, "kvzip").name == "kvzip"
