"""Which rows of a long prompt are read, and how often they count: over all samples, sums are on average those of all rows."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpatch
from kvpatch.policies import sampling
from tests.helpers.tiny import left_pad, make, prompt

ROWS, READ = sampling.ROWS, sampling.READ


def read(rows_BQ, seed=0, layer=0):
    """Positions of the rows that are read, of each text."""
    columns = sampling.sample_rows(rows_BQ, seed, layer)[0]
    return [row[index[index >= 0]].tolist() for row, index in zip(rows_BQ, columns, strict=True)]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6000), st.integers(0, 3000), st.integers(0, 99))
def test_the_newest_block_and_one_of_every_r_before_it(n, start, seed):
    (chosen,) = read(torch.arange(start, start + n)[None], seed)
    r = -(-n // READ)
    assert chosen == sorted(set(chosen))
    assert chosen[-ROWS:] == list(range(start + max(n - ROWS, 0), start + n))
    blocks = sorted({(start + n - 1 - row) // ROWS for row in chosen})
    groups = [(block - 1) // r for block in blocks[1:]]
    assert groups == sorted(set(groups))
    whole_groups = ((n + ROWS - 1) // ROWS - 1) // r
    assert len(groups) in (whole_groups, whole_groups + 1)
    assert len(chosen) <= READ + 2 * ROWS
    if n <= READ:
        assert chosen == list(range(start, start + n))


def test_a_padded_text_reads_the_rows_that_it_reads_alone():
    lengths, width = (3000, 2100, 700), 3000
    rows = torch.stack([torch.cat([torch.full((width - n,), -1), torch.arange(n)]) for n in lengths])
    assert read(rows) == [read(torch.arange(n)[None])[0] for n in lengths]


def test_layers_and_seeds_read_other_rows():
    rows = torch.arange(5000)[None]
    assert read(rows) == read(rows) != read(rows, seed=1)
    assert read(rows) != read(rows, layer=1)


def statistics(model, ids, mask, policy, scores):
    """The sums of a prompt that is held in full [layers][name][B,H,T], float64."""
    with torch.no_grad(), kvpatch.patched(model, policy, ids.shape[1] + 1, scores=scores):
        cache = model(ids, attention_mask=mask).past_key_values
        names = kvpatch.get_policy(policy).needs.statistics
        return [{name: layer.state_view()[name].clone() for name in names} for layer in cache.layers]


@pytest.mark.parametrize("policy", ["h2o", "scissorhands", "roco", "keyformer"])
@pytest.mark.parametrize("n", [13, 15])  # a group of two blocks of three, the older of one row; a group of one
def test_the_mean_over_all_samples_is_the_sum_over_all_rows(policy, n, monkeypatch):
    """Each group draws one of r = 3 blocks, the oldest group also one that it has not: 3 x 3 or 3 x 3 x 3 samples."""
    monkeypatch.setattr(sampling, "ROWS", 2)
    monkeypatch.setattr(sampling, "READ", 5)
    model, ids = make("llama_gqa").double(), prompt(2, n)
    mask = left_pad(ids, [n, 4])  # a text of up to READ rows is read whole
    groups = -(-(-(-n // 2) - 1) // 3)
    found = []
    for places in product(range(3), repeat=groups):
        shares = (torch.tensor(places) + 0.5) / 3
        drawn = SimpleNamespace(uniform=lambda seed, layer, head, query, key, shares=shares: shares[key.clamp(max=groups - 1)])
        monkeypatch.setattr(sampling, "noise", drawn)
        found.append(statistics(model, ids, mask, policy, "sampled"))
    for layer, wanted in enumerate(statistics(model, ids, mask, policy, "all")):
        for name, total in wanted.items():
            samples = torch.stack([each[layer][name] for each in found])
            torch.testing.assert_close(samples.mean(0), total, rtol=1e-12, atol=1e-12)
            assert not torch.allclose(samples[0, 0], total[0]) and torch.allclose(samples[0, 1], total[1])


@pytest.mark.parametrize("policy", ["h2o", "keyformer"])
def test_short_prompts_keep_what_they_keep(policy):
    model, ids = make("llama_gqa"), prompt(2, 40)
    held = []
    for scores in ("all", "sampled"):
        with torch.no_grad(), kvpatch.patched(model, policy, 0.4, scores=scores):
            held.append(model(ids, attention_mask=left_pad(ids, [40, 31])).past_key_values.positions(0))
    assert torch.equal(*held)
