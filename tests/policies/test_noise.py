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


WORD = 0xFFFFFFFF


def _mixed(h):
    """MurmurHash3's finaliser, in Python's own integers."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B & WORD
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & WORD
    return h ^ (h >> 16)


def drawn(seed, layer, head, query, key):
    h = _mixed((head * 0x27D4EB2F + ((seed * 0x9E3779B1 + 0x165667B1 & WORD) + layer * 0x7FEB352D & WORD)) & WORD)
    h = _mixed(h ^ (query * 0x2C1B3C6D + 0x297A2D39 & WORD))
    h = _mixed((key * 0x1B873593 + 0x52DCE729 ^ h) & WORD)
    return ((h >> 9) + 0.5) * 2.0**-23


@pytest.mark.parametrize(("seed", "layer", "query"), [(0, 0, -1), (12345, 3, 17), (-7, 31, 99_999), (2**40 + 1, 1, 0)])
def test_a_draw_is_the_hash_that_it_was(seed, layer, query):
    """Saved caches and yesterday's runs go on with these numbers: the same seed gives the same text, in every version."""
    keys, heads = [0, 1, 7, 511, 100_000, 2**29], [0, 1, 5, 63]
    got = noise.uniform(seed, layer, torch.tensor(heads)[:, None], query, torch.tensor(keys))
    want = torch.tensor([[drawn(seed, layer, head, query, key) for key in keys] for head in heads], dtype=torch.float64)
    assert torch.equal(got, want.float())
    layers = torch.full((4, 1), layer)
    assert torch.equal(noise.uniform(seed, layers, torch.tensor(heads)[:, None], query, torch.tensor(keys)), got)


def test_distributions_are_their_inverse_functions():
    u = torch.tensor([0.5 * 2.0**-23, 0.01, 0.3, 0.5, 0.9, 1 - 2.0**-23], dtype=torch.float64)
    torch.testing.assert_close(torch.exp(-torch.exp(-noise.gumbel(u))), u)
    deviation = (noise.gaussian(u) - 0.5772) / 1.2825
    torch.testing.assert_close(0.5 * (1 + torch.erf(deviation / math.sqrt(2.0))), u, atol=1e-9, rtol=0)
    assert noise.GUMBEL_MEAN == 0.5772
    assert noise.GUMBEL_STD == 1.2825
