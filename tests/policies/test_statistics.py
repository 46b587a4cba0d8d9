"""Statistics of attention probabilities, beside their definitions."""

import pytest
import torch

from kvpatch.policies.context import Block
from kvpatch.policies.needs import NoisySums
from kvpatch.policies.numbers import sum_in_parts
from kvpatch.policies.statistics import STATISTICS, kernel_of


def _block(p, tau=1.0, noise_NMG=None):
    keys = (p[:, 0] > 0).sum(-1)
    return Block(p, keys, noise_NMG, lambda: None, tau, 0, 0)


@pytest.mark.parametrize("tau", [1.0, 1.7, 2.0, 0.5, torch.tensor(1.7), torch.tensor([1.7, 0.6])[:, None, None, None]])
@pytest.mark.parametrize("noisy", [False, True])
def test_statistics_are_their_definitions(tau, noisy):
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    p = x.softmax(-1)
    zeta = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    block = _block(p.clone(), tau, zeta.exp() if noisy else None)
    need = NoisySums()
    torch.testing.assert_close(STATISTICS["sum"](block, need), p.sum(1).sum(1))
    torch.testing.assert_close(STATISTICS["squares"](block, need), (p.sum(1) / 3).square().sum(1))
    assert torch.equal(STATISTICS["count"](block, need), (p > 1 / 5).double().sum((1, 2)))
    shifted = (x + zeta.permute(0, 2, 1)[:, :, None]) if noisy else x
    want = (shifted / tau).softmax(-1).sum((1, 2))
    torch.testing.assert_close(STATISTICS["gumbel"](_block(p.clone(), tau, block.noise_NMG), need), want)


def test_a_statistic_has_a_kernel_until_it_is_replaced(monkeypatch):
    assert {name: kernel_of(name) for name in STATISTICS} == {name: name for name in ("sum", "squares", "count", "gumbel")} | {
        "area": None
    }
    monkeypatch.setitem(STATISTICS, "sum", lambda block, score: block.p_NGRM.sum((1, 2)) * 2)
    assert kernel_of("sum") is None


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e12])
def test_running_sums_in_whole_parts(scale):
    """On a GPU torch sums whole numbers alone deterministically."""
    weight = torch.rand(2, 3, 400, generator=torch.Generator().manual_seed(3)).pow(8) * scale
    got, want = sum_in_parts(weight), weight.double().cumsum(-1)
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=1e-10 * scale)
    assert (sum_in_parts(torch.zeros(1, 4)) == 0).all() and (got.diff(dim=-1) >= 0).all()
