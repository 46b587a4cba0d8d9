"""The perturbation study measures what it says: exactly, on every architecture, and the sets it compares are the library's."""

import pytest
import torch
import torch.nn.functional as F

from kvpatch.arch import adapter_of
from tests.helpers.tiny import FIVE, make, prompt
from tools.evaluation import perturbation

N, FED, WINDOW = 40, 6, 8


def grouped(x_BNT: torch.Tensor, model) -> torch.Tensor:
    """The mean over the query heads of a KV head, written out again."""
    group = 4 // getattr(model.config, "num_key_value_heads", 4)
    return x_BNT.unflatten(1, (-1, group)).mean(2).repeat_interleave(group, 1)


def bias(module) -> torch.Tensor:
    found = getattr(module, adapter_of(module).projection).bias
    return torch.zeros(()) if found is None else found


@pytest.mark.parametrize("name", FIVE)
def test_heads_add_up_to_the_modules_own_output_and_everything_kept_moves_nothing(name):
    model, ids = make(name), prompt(2, N + FED)
    layers, logits = perturbation.look(model, ids, N)
    modules = [module for module in model.modules() if adapter_of(module) is not None]
    assert len(layers) == len(modules) == 2
    torch.testing.assert_close(logits, model(ids).logits)
    for layer, module in zip(layers, modules, strict=True):
        y_BRE = (layer.attention() @ layer.v_BNTD @ layer.w_NDE).sum(1) + bias(module)
        torch.testing.assert_close(y_BRE, layer.y_BRE, rtol=0, atol=2e-6, check_dtype=False)
        whole = perturbation.measures(layer, torch.ones(1, 1, 1, N + FED, dtype=torch.bool))
        torch.testing.assert_close(whole.pop("mass"), torch.ones(2, 4, FED, dtype=torch.double))
        assert all(value.abs().max() < 1e-12 for value in whole.values())


def test_the_measures_are_what_the_formulas_say():
    layers, _ = perturbation.look(make("llama_gqa"), prompt(2, N + FED), N)
    kept = torch.rand(2, 4, 1, N + FED, generator=torch.Generator().manual_seed(0)) < 0.4
    kept[..., N:] = True
    for layer in layers:
        found, a, u = perturbation.measures(layer, kept), layer.attention(), layer.values()
        for b, h, q in ((0, 0, 0), (1, 3, 5)):
            a_T, u_TE, in_T = a[b, h, q], u[b, h], kept[b, h, 0]
            m = a_T[in_T].sum()
            o, gone = a_T @ u_TE, a_T[~in_T] @ u_TE[~in_T]
            hat = F.softmax(layer.x_BNRT[b, h, q][in_T], 0) @ u_TE[in_T]
            heavy = a_T * u_TE.abs().sum(-1)
            # (o - o^) / 0.5 with half of the attention on a value of zero
            sink = o - a_T[in_T] @ u_TE[in_T] / (0.5 + 0.5 * m)
            want = {
                "mass": m,
                "l1": (o - hat).abs().sum(),
                "lost": gone.abs().sum(),
                "weighted": heavy[~in_T].sum(),
                "theta": heavy[~in_T].sum() + (1 / m - 1) * heavy[in_T].sum(),
                "sink 0.5": sink.abs().sum(),
            }
            torch.testing.assert_close({name: found[name][b, h, q] for name in want}, want)
        assert (found["l1"] <= found["theta"] + 1e-12).all()
        assert (found["lost"] <= found["weighted"] + 1e-12).all()
        assert found["layer_l1"].shape == (2, 1, FED)
        assert (found["layer_l1"] <= found["l1"].sum(1, keepdim=True)).all()


@pytest.mark.parametrize("name", ["llama_gqa", "mpt", "gptj", "gpt2"])
def test_the_library_keeps_what_the_window_of_the_studied_layers_says(name):
    """Scores from the study's own attention give the sets that snapkv and critical_snapkv keep."""
    model, ids = make(name), prompt(2, N + FED)
    layers, _ = perturbation.look(model, ids, N - WINDOW)
    count = N // 2 - WINDOW
    one, two = (
        perturbation.kept_sets(model, ids, N, policy, 0.5, window=WINDOW)[0] for policy in ("snapkv", "critical_snapkv")
    )
    assert any(not torch.equal(a, b) for a, b in zip(one, two, strict=True))
    for layer, top, critical in zip(layers, one, two, strict=True):
        score = grouped(layer.attention()[:, :, :WINDOW, : N - WINDOW].mean(2), model)
        # max-pooling makes ties, which go to the later token
        score = F.max_pool1d(score, 7, stride=1, padding=3) * (1 + 1e-9 * torch.arange(N - WINDOW).double())
        norm = grouped(layer.values()[:, :, : N - WINDOW].abs().sum(-1), model)
        share = score / score.sum(-1, keepdim=True)
        wanted = perturbation.top(score, count), perturbation.two_stage(share, norm, count)
        for kept, chosen in zip((top, critical), wanted, strict=True):
            assert kept[..., N - WINDOW :].all()
            assert torch.equal(kept[..., : N - WINDOW], chosen)


def test_ties_are_counted_apart():
    layers, _ = perturbation.look(make("llama"), prompt(2, N + FED), N)
    norms = [layer.values().abs().sum(-1) for layer in layers]
    few = [torch.zeros(2, 4, N + FED, dtype=torch.bool).index_fill(2, torch.arange(20, N + FED), True) for _ in layers]
    same = perturbation.compare(layers, (few, few), norms)
    assert same["ties"] == 1.0
    assert same["lower"] is None
    assert same["cases"] == 2 * 2 * 4 * FED
    more = [kept.clone() for kept in few]
    more[0][:, 0] = True  # one head of eight, and it keeps all
    better = perturbation.compare(layers, (few, more), norms)
    assert better["ties"] == 0.875
    assert better["lower"] == better["lower_row_heads"] == better["lower_heads"] == better["weighted_lower"] == 1.0
    assert sum(share for share, *_ in better["split"]) == pytest.approx(0.125, abs=1e-3)
