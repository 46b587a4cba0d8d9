"""The numbers behind random eviction and Keyformer: their distribution, and that they depend on nothing but their key."""

import math

import pytest
import torch

from kvpatch.policies import noise

N = 200_000


def test_uniform_numbers_are_uniform_and_uncorrelated():
    u = noise.uniform(3, 1, torch.tensor(2), 5, torch.arange(N)).double()
    assert 0 < u.min()
    assert u.max() < 1
    # Kolmogorov-Smirnov at 1e-4: 2.2 / sqrt(N)
    distance = (u.sort().values - (torch.arange(N) + 0.5) / N).abs().max()
    assert distance < 2.2 / math.sqrt(N)
    for lag in (1, 2, 64):
        assert abs(torch.corrcoef(torch.stack([u[:-lag], u[lag:]]))[0, 1]) < 4.5 / math.sqrt(N)


@pytest.mark.parametrize("change", ["seed", "layer", "head", "query"])
def test_streams_are_independent(change):
    keys = {"seed": 3, "layer": 1, "head": 2, "query": 5}
    other = {**keys, change: keys[change] + 1}

    def draw(seed, layer, head, query):
        return noise.uniform(seed, layer, torch.tensor(head), query, torch.arange(N)).double()

    a, b = draw(**keys), draw(**other)
    assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 4.5 / math.sqrt(N)
    assert (a == b).double().mean() < 1e-3


def test_gumbel_and_gaussian_have_the_papers_mean_and_deviation():
    u = noise.uniform(0, 0, torch.tensor(0), -1, torch.arange(N))
    for kind in (noise.gumbel, noise.gaussian):
        z = kind(u).double()
        assert torch.isfinite(z).all()
        assert z.mean() == pytest.approx(noise.GUMBEL_MEAN, abs=5 * 1.2825 / math.sqrt(N))
        assert z.std() == pytest.approx(noise.GUMBEL_STD, rel=0.01)
    skew = ((noise.gumbel(u) - 0.5772) / 1.2825).double().pow(3).mean()
    assert skew == pytest.approx(1.14, abs=0.06), "Gumbel is skewed, a Gaussian is not"


def test_extreme_hashes_stay_finite():
    for u in (torch.tensor(0.5 * 2.0**-23), torch.tensor((2.0**23 - 0.5) * 2.0**-23)):
        assert 0 < u < 1
        assert torch.isfinite(noise.gumbel(u))
        assert torch.isfinite(noise.gaussian(u))
