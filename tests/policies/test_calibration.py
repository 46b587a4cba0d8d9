"""Calibrations: what is measured, the file, and the policy that reads it."""

import dataclasses
import json

import pytest
import torch

import kvpatch
from kvpatch import KVPatchError
from kvpatch.evaluation.calibrate import calibrate
from kvpatch.policies.calibration import Calibration
from kvpatch.policies.measures import Rotation
from kvpatch.storage.calibration import save_calibration
from kvpatch.storage.kinds import CALIBRATION
from tests.cli.test_cli import folder, run  # noqa: F401
from tests.helpers.comparing import certain
from tests.helpers.files import rewritten
from tests.helpers.tiny import left_pad, make, prompt
from tests.helpers.tiny_families import FAMILIES
from tests.helpers.tiny_families import make as make_family
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
    assert calibration.tokens == 47 and sorted(calibration.layers) == [0, 1]
    for l, heads in enumerate(queries):
        for g, rows in enumerate(heads):
            q = torch.stack(rows).double()
            wanted = torch.linalg.svd(q).Vh[0]
            wanted = wanted * (1 if q.mean(0) @ wanted > 0 else -1)
            torch.testing.assert_close(calibration.layers[l]["direction"][g].double(), wanted, atol=1e-5, rtol=0)


def of_kind(name):
    """A tiny model; "yarn" turns and lengthens."""
    if name in FAMILIES:
        return make_family(name, dtype=torch.float64)
    model = make("llama_gqa" if name == "yarn" else name, dtype=torch.float64)
    if name == "yarn":
        scaled = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 8}
        model.config.rope_parameters = scaled
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
        assert model.model.rotary_emb.attention_scaling > 1.1
    return model


def rotated_back(oracle, l, h, asked):
    """Queries of a head by position, at position 0."""
    turned = oracle.decoder.rotations(l, max(asked) + 1)
    return torch.stack([torch.linalg.solve(turned[i].T, q.double()) @ turned[0] for i, q in asked.items()])


@pytest.mark.parametrize("name", ["llama_gqa", "gptj", "yarn"])
def test_mean_queries_without_their_rotation(name):
    """Against the oracle's queries of all pieces, turned back one by one; pairs and angles against its matrices."""
    model = of_kind(name)
    with torch.no_grad():
        layers = calibrate(model, [prompt(1, 30, seed=3), prompt(1, 17, seed=4)]).layers
    options, queries = reference.settings("full", {}), {}
    for n, seed in ((30, 3), (17, 4)):
        oracle = reference.Oracle(decoder_of(model), n, 1.0, options, 1, None)
        oracle.forward(prompt(1, n, seed=seed)[0].tolist())
        for l, heads in enumerate(oracle.asked):
            for h, asked in enumerate(heads):
                queries.setdefault((l, h), []).append(rotated_back(oracle, l, h, asked))
    for (l, h), rows in queries.items():
        g, own, found = h // oracle.G, h % oracle.G, layers[l]
        q = torch.cat(rows)
        torch.testing.assert_close(found["mean"][g, own].double(), q.mean(0), atol=1e-5, rtol=0)
        for f, (a, b) in enumerate(found["pairs"].tolist()):
            norm = sum(abs(complex(*pair)) for pair in q[:, [a, b]].tolist()) / len(q)
            assert float(found["norm"][g, own, f]) == pytest.approx(norm, abs=1e-5)
            matrices = oracle.decoder.rotations(l, 30)[[0, 1, 29]][:, [a, b]][:, :, [a, b]]
            cos, sin = (found["turn"][f] * torch.tensor([0, 1, 29])).cos(), (found["turn"][f] * torch.tensor([0, 1, 29])).sin()
            wanted = torch.stack([torch.stack([cos, sin], -1), torch.stack([-sin, cos], -1)], 1) * matrices[0, 0, 0]
            torch.testing.assert_close(matrices.double(), wanted, atol=1e-5, rtol=0)


def test_angles_of_a_rounded_table():
    """The angle of far positions, from a table in bfloat16."""
    turn = 10.0 ** -torch.arange(4, dtype=torch.float64)

    def turned(place):
        cos, sin = (place * turn).cos().bfloat16(), (place * turn).sin().bfloat16()
        return torch.cat([torch.cat([cos.diag(), sin.diag()], 1), torch.cat([-sin.diag(), cos.diag()], 1)])

    found = Rotation.of(turned, 2048)
    assert found.pairs_P2.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    torch.testing.assert_close(found.turn_P, turn, atol=3e-6, rtol=0)  # 2^-9 in cosine and sine, at position 1024
    assert Rotation.of(lambda place: torch.eye(4), 9) is None and Rotation.of(turned, 1) is None


@pytest.mark.parametrize("more", [{}, {"schedule": "decode"}, {"bits": 8, "every": 3}, {"block": 7, "sinks": 2}], ids=str)
def test_as_the_oracle_has_it(model, calibration, more):
    certain("llama_gqa", "q_filter", 0.3, steps=14, model=model, calibration=calibration, **more)


STEPS = {"every": 3, "reach": 64}


@pytest.mark.parametrize(
    ("k", "more"),
    [
        (5, STEPS), (4, {"every": 1}), (12, {**STEPS, "schedule": "both"}), (0.3, {**STEPS, "schedule": "both", "recent": 4}),
        (0.4, {"schedule": "both", "every": 1, "block": 7, "sinks": 2}), (6, {**STEPS, "bits": 8, "reach": 1}),
    ],
    ids=str,
)  # fmt: skip
def test_probes_as_the_oracle_has_it(model, calibration, k, more):
    certain("llama_gqa", "tri_attention", k, steps=14, model=model, calibration=calibration, **more)


def test_probes_of_longer_queries():
    """Of a rotation that lengthens what it turns; the others are in tests/oracle/test_oracle_decoding.py."""
    certain("llama_gqa", "tri_attention", 5, steps=14, model=of_kind("yarn"), **STEPS)


@pytest.mark.parametrize(
    "position_ids", [None, torch.arange(30)[None], torch.arange(30).expand(2, -1) + 3], ids=["none", "all", "far"]
)
def test_queries_are_not_turned_to_where_keys_are_not(model, calibration, position_ids):
    """The bug: without position_ids a padded row's keys were rotated by columns, and its queries by tokens."""
    ids, mask = prompt(2, 30), left_pad(prompt(2, 30), [30, 19])
    counted = (mask.cumsum(-1) - 1).clamp(min=0)
    with kvpatch.patched(model, "tri_attention", 7, calibration=calibration, every=3) as patch:
        cache = patch.new_cache()
        with pytest.raises(KVPatchError, match=r"give position_ids=\(attention_mask.cumsum"):
            model(ids, attention_mask=mask, position_ids=position_ids, past_key_values=cache)
        model(ids, attention_mask=mask, position_ids=counted, past_key_values=cache)  # the cache is as before
        model(ids, position_ids=counted[:1])
        model(ids)
    with kvpatch.patched(model, "tri_attention", 1.0, calibration=calibration):
        model(ids, attention_mask=mask, position_ids=position_ids)


@pytest.mark.parametrize(
    ("k", "more"),
    [(0.5, {}), (0.3, {"every": 3}), (0.75, {"block": 7}), (0.5, {"schedule": "prompt", "bits": 8}), (1.0, {})],
    ids=str,
)
def test_whole_heads_as_the_oracle_has_it(model, calibration, k, more):
    certain("llama_gqa", "duo", k, steps=14, model=model, calibration=calibration, sinks=2, recent=4, **more)


@pytest.mark.parametrize("name", ["llama_gqa", "bloom", "mistral"])
def test_areas_are_those_under_the_cumulated_attention(name):
    """Row by row from the oracle's probabilities and values, as literal cumulated sums."""
    model, cumulated = of_kind(name), {}
    with torch.no_grad():
        layers = calibrate(model, [prompt(1, 30, seed=3), prompt(1, 17, seed=4), prompt(1, 3, seed=5)]).layers
    for n, seed in ((30, 3), (17, 4)):
        oracle = reference.Oracle(decoder_of(model), n, 1.0, reference.settings("full", {}), 1, None)
        oracle.forward(prompt(1, n, seed=seed)[0].tolist())
        for l, heads in enumerate(oracle.rows):
            for g, rows in enumerate(heads):
                given = [oracle.decoder.output_rows(l, g * oracle.G + h) for h in range(oracle.G)]
                size = {i: sum(float((v @ w).norm()) for w in given) / oracle.G for i, v in oracle.values[l][g].items()}
                for row in rows[4:]:
                    for h in range(oracle.G):
                        a = [row.a[i][h] * size[i] if i in row.a and i >= 4 else 0.0 for i in range(row.t + 1)]
                        cumulated.setdefault((l, g), []).append(sum(sum(a[: i + 1]) for i in range(len(a))) / len(a))
    assert len(cumulated) == sum(len(own["area"]) for own in layers.values())
    for (l, g), areas in cumulated.items():
        assert float(layers[l]["area"][g]) == pytest.approx(sum(areas) / len(areas), abs=1e-6)


def test_texts_too_short_for_an_area(model):
    with torch.no_grad():
        own = calibrate(model, [prompt(1, 4)]).layers
    assert all(torch.equal(found["area"], torch.zeros(2)) for found in own.values())


def test_an_output_projection_that_is_not_known_gives_no_areas():
    model = make_family("bitnet", dtype=torch.float64)  # a norm stands before it
    with torch.no_grad():
        own = calibrate(model, [prompt(1, 20)])
    assert all("direction" in found and "area" not in found for found in own.layers.values())
    with pytest.raises(KVPatchError, match="'duo' weighs values by the output projection, but in .* use 'streaming_llm'"):
        kvpatch.patch(model, "duo", 0.5, calibration=own)
    kvpatch.patch(model, "q_filter", 0.5, calibration=own).remove()


AREAS = [[0.2, 0.5], [0.4, 0.2]]


@pytest.fixture
def areas(calibration):
    layers = {layer: dict(calibration.layers[layer]) | {"area": torch.tensor(own)} for layer, own in enumerate(AREAS)}
    return dataclasses.replace(calibration, layers=layers)


@pytest.mark.parametrize(
    ("k", "table"),
    [
        (0.5, ((7, 1.0), (1.0, 7))),
        (0.01, ((7, 1.0), (7, 7))),  # at least one
        ("25%", ((7, 1.0), (7, 7))),
        (0.75, ((1.0, 1.0), (1.0, 7))),  # of equal areas the lower layer's
        (torch.tensor(0.99), ((1.0, 1.0), (1.0, 7))),
        (1.0, (1.0, 1.0)),
    ],
    ids=str,
)
def test_heads_of_the_largest_areas_are_whole(model, areas, k, table):
    with kvpatch.patched(model, "duo", k, calibration=areas, sinks=2, recent=5) as patch:
        assert patch.settings.budget.per_layer == table
        cache = patch.new_cache()
        model(prompt(1, 20), past_key_values=cache)
        for layer, own in enumerate(table):
            for head, size in enumerate(own if isinstance(own, tuple) else (own, own)):
                places = cache.positions(layer)[0, head]
                held = sorted(places[places >= 0].tolist())
                assert held == ([0, 1, *range(15, 20)] if size == 7 else list(range(20)))


def test_layers_with_a_window_of_their_own_have_no_whole_heads():
    model = make_family("gpt_neo", dtype=torch.float64)
    with torch.no_grad():
        own = calibrate(model, [prompt(1, 20)])
    with kvpatch.patched(model, "duo", 0.5, calibration=own, sinks=1, recent=2) as patch:
        bounds, per_layer = patch.settings.bounds, patch.settings.budget.per_layer
        assert None in bounds and {*bounds} != {None}
        assert [one == 1.0 for one in per_layer] == [bound is not None for bound in bounds]
    certain("gpt_neo", "duo", 0.5, model=model, calibration=own, sinks=1, recent=2)


@pytest.mark.parametrize(
    ("policy", "k", "more", "says"),
    [
        *(("duo", k, {}, r"k=.*: policy 'duo' keeps heads whole, and k is their share: give k=0.5") for k in (
            384, "2GiB", [0.5, 0.5], [[1.0, 7], [7, 7]], kvpatch.Mass(0.9), kvpatch.Share(0.5))),
        ("duo", 0.0, {}, "is not a share in"),
        ("duo", 0.5, {"recent": 0.5}, "recent=0.5 with sinks=128: .* give numbers of tokens, such as recent=256"),
        ("duo", 0.5, {"recent": 0, "sinks": 0}, "recent=0 with sinks=0: "),
        ("adaptive(duo)", 0.5, {}, "'adaptive_duo' divides a budget over heads or layers that has no size"),
        ("pyramid(duo)", 0.5, {}, "'pyramid_duo' divides a budget over heads or layers"),
    ],
)  # fmt: skip
def test_whole_heads_have_no_other_budget(model, calibration, policy, k, more, says):
    with pytest.raises(KVPatchError, match=says):
        kvpatch.patch(model, policy, k, calibration=calibration, **more)


def test_kernels_attend_and_torch_evicts_alike(model, calibration):
    certain("llama_gqa", "q_filter", 9, model=model, calibration=calibration, backend="torch", pads=(0, 0))


def test_the_file_is_read_as_it_was_written(model, calibration, path):
    again = kvpatch.load_calibration(path)
    assert again == calibration and again.model == dict(calibration.model) and repr(again) == repr(calibration)
    assert len({again, calibration}) == 1 and repr(again) == f"<Calibration {again.digest[:16]}>"
    with pytest.raises(dataclasses.FrozenInstanceError):
        again.tokens = 1
    with kvpatch.patched(model, "q_filter", 6, calibration=again) as patch:
        cache = patch.new_cache()
        model(prompt(1, 12), past_key_values=cache)
        patch.save_cache(cache, path.with_name("cache"))
        assert patch.load_cache(path.with_name("cache")).get_seq_length() == 12
    other = Calibration(again.model, again.layers, 48, "0" * 64)
    with kvpatch.patched(model, "q_filter", 6, calibration=other) as patch, pytest.raises(KVPatchError, match="calibration"):
        patch.load_cache(path.with_name("cache"))


def numbers(about, tensors):
    tensors["0.direction"][0, 0] = torch.nan


def shape(about, tensors):
    tensors["1.direction"] = torch.zeros(3)


def narrower(about, tensors):
    tensors["0.norm"] = tensors["0.norm"][..., 1:].clone()


BAD = [
    (lambda about, t: about.update(format="kvpatch cache 5"), f"not of this version of kvpatch ..{CALIBRATION.format}"),
    (lambda about, t: about.update(more=1), "its description has"),
    (lambda about, t: about.update(tokens=0), "names no model, or no tokens"),
    *((lambda about, t, layers=layers: about.update(layers=layers), "its layers are") for layers in (
        [0, 0], [], [-1], ["0"], 1, None)),
    (lambda about, t: t.pop("1.direction"), "of layer 1 it holds mean, norm, pairs, turn, area where direction, mean"),
    (lambda about, t: t.pop("0.norm"), "of layer 0 it holds direction, mean, pairs, turn, area where"),
    (lambda about, t: t.update(more=torch.zeros(2)), "it holds more, which are no statistics of its layers"),
    (numbers, "not finite"), (shape, "1.direction is torch.float32 .3. where torch.float32 .H, D. belongs"),
    (narrower, "0.pairs is torch.int64 .4, 2. where torch.int64 .3, 2. belongs"),
    (lambda about, t: t.update({"0.turn": t["0.turn"].float()}), "0.turn is torch.float32 .4. where torch.float64 .4. belongs"),
    (lambda about, t: t["1.pairs"].add_(5), "1.pairs has a number that is no channel of 8"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "says"), BAD, ids=[says for _, says in BAD])
def test_a_file_that_is_none(path, change, says):
    rewritten(path, change)
    with pytest.raises(KVPatchError, match=f"no valid calibration: .*{says}.*kvpatch calibrate"):
        kvpatch.load_calibration(path)


def test_another_model_and_other_shapes(model, calibration):
    with pytest.raises(KVPatchError, match="calibration= is of another model: .*Run `kvpatch calibrate` on this model"):
        kvpatch.patch(make("llama_gqa", dtype=torch.float64, seed=1), "q_filter", 6, calibration=calibration)
    fewer = dataclasses.replace(calibration, layers={0: calibration.layers[0]})
    with pytest.raises(KVPatchError, match="calibration= has nothing for 'direction' of layer 1"):
        kvpatch.patch(model, "q_filter", 6, calibration=fewer)
    for given, says in ((None, "needs a calibration of this model: run `kvpatch calibrate"), ("file", "is no calibration")):
        with pytest.raises(KVPatchError, match=says):
            kvpatch.patch(model, "q_filter", 6, calibration=given)
    with pytest.raises(KVPatchError, match="positions='renumbered' does not go with policy 'q_filter'"):
        kvpatch.patch(model, "q_filter", 6, calibration=calibration, positions="renumbered")


@pytest.mark.parametrize("name", ["gpt2", "bloom", "falcon_alibi", "glm"])
def test_without_a_rotation(name):
    """The other statistics are there; tri_attention is refused, with and without a file."""
    model = of_kind(name)
    with torch.no_grad():
        own = calibrate(model, [prompt(1, 20, seed=3)])
    assert {*own.layers[0]} == {"direction", "area"}
    for given in (own, None):
        with pytest.raises(KVPatchError, match="policy 'tri_attention' .*use another policy, such as"):
            kvpatch.patch(model, "tri_attention", 6, calibration=given)
    for policy, k in (("q_filter", 6), ("duo", 0.5)):
        with kvpatch.patched(model, policy, k, calibration=own):
            pass


def test_a_file_without_mean_queries(model, calibration, path):
    """As of a model without rotations: it is read, and serves what needs no more."""

    def directions(about, tensors):
        for name in [name for name in tensors if not name.endswith((".direction", ".area"))]:
            del tensors[name]

    rewritten(path, directions)
    old = kvpatch.load_calibration(path)
    with kvpatch.patched(model, "q_filter", 6, calibration=old):
        pass
    with pytest.raises(KVPatchError, match="calibration= has nothing for 'mean' of layer 0: calibrate this model anew"):
        kvpatch.patch(model, "tri_attention", 6, calibration=old)
    with pytest.raises(KVPatchError, match="calibration= has nothing for 'weight' of layer 0"):
        kvpatch.patch(model, "learned", 6, calibration=old)
    wide = dict(calibration.layers[1]) | {"mean": calibration.layers[1]["mean"][..., :3]}
    other = dataclasses.replace(calibration, layers={**calibration.layers, 1: wide})
    with pytest.raises(KVPatchError, match=r"has \[2, 2, 3\] for 'mean' of layer 1 where \[2, 2, 8\] belongs"):
        kvpatch.patch(model, "tri_attention", 6, calibration=other)
    with pytest.raises(KVPatchError, match="needs a calibration of this model: run `kvpatch calibrate"):
        kvpatch.patch(model, "tri_attention", 6)
    with pytest.raises(KVPatchError, match="reach=0"):
        kvpatch.patch(model, "tri_attention", 6, calibration=calibration, reach=0)


def test_from_the_command_line(folder, tmp_path):  # noqa: F811
    (tmp_path / "text").write_text("what it reads, and reads again " * 9)
    out = tmp_path / "c.safetensors"
    assert "Give a text after the model" in run("calibrate", folder, "--out", out).output
    result = run("calibrate", folder, tmp_path / "text", "--out", out, "--length", 50, "--tokens", 120, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["tokens"] == kvpatch.load_calibration(out).tokens <= 120
    arguments = ("generate", folder, "--prompt", "what it reads", "--max-new-tokens", 3, "--policy", "q_filter", "-k", 4)
    assert run(*arguments, "-o", f"calibration={out}").exit_code == 0
    probing = [argument if argument != "q_filter" else "tri_attention" for argument in arguments]
    assert run(*probing, "-o", f"calibration={out}", "-o", "every=1").exit_code == 0
    whole = [argument if argument != "q_filter" else "duo" for argument in arguments[:-1]]
    assert run(*whole, 0.5, "-o", f"calibration={out}", "-o", "sinks=1").exit_code == 0
    assert "needs a calibration" in run(*probing).output
    assert "needs a calibration" in run(*arguments).output


@pytest.mark.parametrize(("command", "label"), [(("calibrate",), "calibrating"), (("learn", "--teacher", "kvzip"), "learning")])
def test_the_bar_counts_pieces_and_draws_on_a_terminal_alone(folder, tmp_path, monkeypatch, command, label):  # noqa: F811
    (tmp_path / "text").write_text("what it reads, and reads again " * 9)
    name, *more = command
    arguments = (name, folder, tmp_path / "text", "--out", tmp_path / "c.safetensors", "--length", 8, "--tokens", 20)
    result = run(*arguments, *more)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    for variable, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "80"}.items():
        monkeypatch.setenv(variable, value)
    drawn = run(*arguments, *more)
    assert drawn.exit_code == 0 and drawn.stdout == result.stdout
    assert label in drawn.stderr and "3/3" in drawn.stderr


@pytest.mark.parametrize("n", [1, 20])
def test_heads_that_keep_everything_are_saved_while_they_wait_to_evict(model, calibration, tmp_path, n):
    """They fill up in more steps than a text may have tokens."""
    options = {"schedule": "decode", "every": 3, "sinks": 2, "recent": 5, "calibration": calibration}
    with torch.no_grad(), kvpatch.patched(model, "duo", 0.75, **options) as patch:
        cache = patch.new_cache()
        model(prompt(1, n), past_key_values=cache)
        patch.save_cache(cache, tmp_path / "cache.safetensors")
        loaded = patch.load_cache(tmp_path / "cache.safetensors")
        assert [layer.mode.steps_until_full for layer in loaded.layers] == [
            layer.mode.steps_until_full for layer in cache.layers
        ]
        got, want = (model(prompt(1, 1, seed=2), past_key_values=one).logits for one in (loaded, cache))
    torch.testing.assert_close(got, want, atol=0, rtol=0)
