"""Which rows of a long prompt are read, and by how much their sums are scaled up."""

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
    columns = sampling.sample(rows_BQ, seed, layer)
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


def test_sums_of_equal_rows_are_exact():
    """Rows that all give a key the same: what was read, scaled up, is what all rows give."""
    rows = torch.arange(100, 3100)[None]
    columns = sampling.sample(rows, 0, 0)
    keys = torch.cat([torch.arange(40), torch.arange(100, 3100)])[None, None]
    scale = sampling.factor(keys, rows, rows.gather(1, columns), torch.float64)
    seen = (rows[0, :, None] >= keys[0, 0]).sum(0)
    was_read = (rows[0, columns[0], None] >= keys[0, 0]).sum(0)
    assert was_read.min() > 0
    torch.testing.assert_close(scale[0, 0] * was_read, seen.double())


@pytest.mark.parametrize("policy", ["h2o", "keyformer"])
def test_short_prompts_keep_what_they_keep(policy):
    model, ids = make("llama_gqa"), prompt(2, 40)
    held = []
    for scores in ("all", "sampled"):
        with torch.no_grad(), kvpatch.patched(model, policy, 0.4, scores=scores):
            held.append(model(ids, attention_mask=left_pad(ids, [40, 31])).past_key_values.positions(0))
    assert torch.equal(*held)
