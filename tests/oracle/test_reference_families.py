"""The oracle on softcaps, sinks and layers that bound themselves, by hand; and every family against its own model."""

import math
from typing import Any

import pytest
import torch

from tests.helpers import tiny_families
from tests.helpers.tiny import prompt
from tests.helpers.tiny_families import FAMILIES, ONE_WINDOW
from tests.oracle import reference, reference_families
from tests.oracle.reference import run
from tests.oracle.reference_models import decoder_of
from tests.oracle.test_reference import Table


class Facts(Table):
    """A table whose layers have a softcap, sinks or windows."""

    def __init__(self, x: Any, *, cap: float | None = None, sinks: Any = None, windows: Any = None, **kwargs: Any) -> None:
        super().__init__(x, **kwargs)
        self.cap, self.sinks, self.windows = cap, sinks, windows or [None] * len(x)

    def softcap(self, l: int) -> float | None:
        return self.cap

    def sink(self, l: int, h: int) -> torch.Tensor | None:
        return None if self.sinks is None else torch.tensor(self.sinks[h], dtype=torch.float64)

    def reach(self, l: int) -> int | None:
        return self.windows[l]


def oracle(table: Table, n: int, policy: str, k: Any, **options: Any) -> reference.Oracle:
    """An oracle that has read n tokens."""
    one = reference.Oracle(table, n, k, reference.settings(policy, options), 4, None)
    one.forward([0] * n)
    return one


FAR, CAP = 1e3, math.log(3.0)  # a logit far above the cap becomes the cap: three times as probable as a logit of 0
CAPPED = [[0.0], [0.0, 0.0], [0.0, FAR, 0.0], [0.0, FAR, 0.0, 0.0]]


def test_a_softcap_by_hand() -> None:
    table = Facts([[CAPPED]], cap=CAP)
    logits = run(table, [0] * 4, [], policy="full", k=1.0).logits
    torch.testing.assert_close(logits[2, :3], torch.tensor([0.2, 0.6, 0.2], dtype=torch.float64))
    torch.testing.assert_close(logits[3], torch.tensor([1.0, 3.0, 1.0, 1.0], dtype=torch.float64) / 6)
    # scores: 1 + 1/2 + 1/5 + 1/6 for token 0 and 1/2 + 3/5 + 1/2 for token 1; without the cap 1.5 and 2.5
    for policy, options in (("key_attention", {}), ("keyformer", {"noise": "none", "recent": 0})):
        assert run(table, [0] * 4, [], policy=policy, k=1, **options).kept == [[[[0]]]]
        assert run(Table([[CAPPED]]), [0] * 4, [], policy=policy, k=1, **options).kept == [[[[1]]]]


TWO = [[0.0], [math.log(2.0), 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]


def test_a_sink_is_in_the_denominator_and_is_no_key() -> None:
    table = Facts([[TWO]], sinks=[math.log(2.0)])
    one = oracle(table, 4, "scissorhands", 1.0)
    a = [row.group for row in one.rows[0][0]]
    assert list(a[0].values()) == pytest.approx([1 / 3])
    assert list(a[1].values()) == pytest.approx([2 / 5, 1 / 5])
    assert list(a[3].values()) == pytest.approx([1 / 6] * 4)
    logits = run(table, [0] * 4, [], policy="full", k=1.0).logits
    assert logits[1].tolist() == pytest.approx([2 / 5, 1 / 5, 0.0, 0.0])
    assert reference.accumulated(one.rows[0][0], 0) == pytest.approx(1 / 3 + 2 / 5 + 1 / 5 + 1 / 6)


def test_a_sink_does_not_count_among_the_keys_of_a_threshold() -> None:
    """Row 1 gives token 0 two fifths: below 1/2, of two keys, but above 1/3, were the sink a third one."""
    for sink, want in ((math.log(2.0), 0.0), (-math.inf, 1.0)):
        rows = oracle(Facts([[TWO]], sinks=[sink]), 2, "scissorhands", 1.0).rows[0][0]
        assert reference.quantized(rows[1:], 0)[0] == want


def test_keyformer_has_a_softmax_of_its_own_without_the_sink() -> None:
    options = {"noise": "none", "recent": 0}
    with_sink = oracle(Facts([[TWO]], sinks=[math.log(2.0)]), 4, "keyformer", 4, **options)
    without = oracle(Table([[TWO]]), 4, "keyformer", 4, **options)
    assert with_sink.running == without.running
    assert with_sink.running[0][0][0] == pytest.approx(1 + 2 / 3 + 1 / 3 + 1 / 4)


def test_each_query_head_has_its_own_sink() -> None:
    a = oracle(Facts([[TWO, TWO]], sinks=[0.0, math.log(7.0)]), 4, "h2o", 1.0).rows[0][0][3].a
    assert a[0] == pytest.approx([1 / 5, 1 / 11])


def flat(layers: int, **kwargs: Any) -> Facts:
    """Token 0 draws all attention that it can."""
    return Facts([[[[9.0, *[0.0] * t] for t in range(8)]]] * layers, **kwargs)


@pytest.mark.parametrize(("policy", "k"), [("full", 1.0), ("h2o", 1.0), ("h2o", 3), ("window", 1), ("tova", [8, 2])])
def test_a_layer_that_bounds_itself_holds_its_windows_newest_tokens(policy: str, k: Any) -> None:
    kept = run(flat(2, windows=[3, None]), [0] * 5, [0] * 3, policy=policy, k=k).kept
    assert [moment[0][0] for moment in kept] == [[2, 3, 4], [3, 4, 5], [4, 5, 6], [5, 6, 7]]
    held = {"full": 8, "window": 1, "tova": 2}.get(policy, k if k != 1.0 else 8)
    assert len(kept[-1][1][0]) == held


def test_it_also_slides_when_nothing_is_due_and_after_every_block() -> None:
    table = flat(2, windows=[2, None])
    assert run(table, [0] * 5, [0], policy="h2o", k=3, schedule="prompt").kept[1][0] == [[4, 5]]
    assert run(table, [0] * 5, [0], policy="h2o", k=3, schedule="decode").kept[0] == [[[3, 4]], [[0, 1, 2, 3, 4]]]
    assert run(table, [0] * 5, [], policy="h2o", k=3, block=2).kept[0][0] == [[3, 4]]


def test_what_it_attends_to_is_its_window() -> None:
    logits = run(flat(2, windows=[None, 2]), [0] * 4, [0], policy="full", k=1.0).logits
    torch.testing.assert_close(logits[4], torch.tensor([0, 0, 0, 0.5, 0.5, 0, 0, 0], dtype=torch.float64))


def test_budgets_count_only_the_layers_that_see_all() -> None:
    windows, options = [2, None, 2, None, 2], {"wrap": ("pyramid",), "beta": 20}
    kept = run(flat(5, windows=windows), [0] * 8, [], policy="window", k=4, **options).kept[0]
    assert [len(layer[0]) for layer in kept] == [2, 7, 2, 1, 2]  # the pyramid of two layers
    kept = run(flat(3, windows=[2, None, None]), [0] * 8, [], policy="window", k=[1, 5, 3]).kept[0]
    assert [len(layer[0]) for layer in kept] == [2, 5, 3]


def test_shared_scores_pass_it_by() -> None:
    options = {"noise": "none", "recent": 0, "shared": True}
    bounded = oracle(flat(3, windows=[2, None, None]), 4, "keyformer", 4, **options)
    two = oracle(flat(2), 4, "keyformer", 4, **options)
    assert bounded.running[1] == two.running[0]


def test_layers_that_all_slide_alike_are_the_policys() -> None:
    kept = run(flat(2, windows=[4, 4]), [0] * 6, [], policy="key_attention", k=2).kept[0]
    assert kept == [[[3, 4]]] * 2  # 0, 1 and 2 are dead, 5 was seen by one row only


# Every family


@pytest.mark.parametrize("name", FAMILIES)
def test_full_is_the_unpatched_model(name: str) -> None:
    model, ids = tiny_families.make(name, dtype=torch.float64), prompt(1, 14)[0]
    reference_families.learn(type(model))
    with torch.no_grad():
        want = model(ids[None]).logits[0]
    got = run(model, ids[:10].tolist(), ids[10:].tolist(), policy="full", k=1.0)
    # in float32: the softmax of eager attention, the rotation of DeepSeek V2 and Llama 4, the choice of experts of V3
    rounded = name.startswith(("deepseek_v2", "deepseek_v3", "llama4"))
    exact = model.config._attn_implementation == "sdpa" and not rounded
    torch.testing.assert_close(got.logits, want, atol=1e-9 if exact else 2e-5, rtol=0)
    reaches = [decoder_of(model).reach(l) for l in range(len(got.kept[0]))]
    given = FAMILIES[name][1]
    assert (7 in reaches) == (given.get("sliding_window", given.get("attention_chunk_size")) is not None)
    assert (set(reaches) == {7}) == (name in ONE_WINDOW)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "bitnet"])
def test_output_rows_are_the_output_projection(name: str) -> None:
    model = tiny_families.make(name, dtype=torch.float64)
    reference_families.learn(type(model))
    decoder, generator = decoder_of(model), torch.Generator().manual_seed(0)
    D, E = decoder.V, decoder.query_heads * decoder.V
    x = decoder.embed(torch.zeros(2, dtype=torch.int64), torch.arange(2))
    y = torch.randn(2, E, generator=generator, dtype=torch.float64)
    seen = []

    def attention(h: torch.Tensor) -> torch.Tensor:
        decoder.project(0, h, torch.arange(2))
        seen.extend((decoder.output(0, y), decoder.output(0, torch.zeros_like(y))))
        return seen[0]

    decoder.block(0, x, attention)
    rows = sum(y[:, h * D : (h + 1) * D] @ decoder.output_rows(0, h) for h in range(decoder.query_heads))
    torch.testing.assert_close(seen[0] - seen[1], rows)


def test_a_norm_before_the_output_projection_has_no_rows() -> None:
    model = tiny_families.make("bitnet", dtype=torch.float64)
    reference_families.learn(type(model))
    with pytest.raises(ValueError, match="norm comes before"):
        decoder_of(model).output_rows(0, 0)


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2"])
def test_gradients_are_the_models(name: str) -> None:
    model, ids = tiny_families.make(name, dtype=torch.float64), prompt(1, 12)
    reference_families.learn(type(model))
    model.set_attn_implementation("eager")
    model(ids).logits.square().mean().backward()
    want = {key: parameter.grad for key, parameter in model.named_parameters()}
    model.zero_grad()
    run(model, ids[0].tolist(), [], policy="full", k=1.0, grad=True).logits.square().mean().backward()
    assert model.config._attn_implementation == "eager"
    for key, parameter in model.named_parameters():
        if want[key] is not None:
            torch.testing.assert_close(parameter.grad, want[key], atol=1e-6, rtol=1e-5, msg=lambda m, key=key: f"{key}: {m}")
