"""A CPU's threads share a prompt's work and change nothing: blocks, sums, outputs and kept positions are one thread's."""

import pytest
import torch

import kvpatch
from kvpatch.backends import torch_backend
from kvpatch.backends.protocol import Geometry, Keys
from tests.helpers.tiny import left_pad, make, prompt

pytestmark = pytest.mark.usefixtures("no_gradients")
THREADS = (1, 2, 3, 4, 16)
SHAPES = (  # batch, KV heads, group, rows, keys before them, head size
    (1, 1, 1, 700, 0, 8),
    (1, 3, 3, 300, 0, 16),
    (2, 5, 2, 150, 40, 8),
    (1, 1, 9, 33, 500, 4),
    (1, 2, 4, 3, 0, 8),
)


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def inputs(B, H, G, Q, past, D, sharpness=1.0):
    """Random queries and keys, and their float64 probabilities [B,H,G,Q,T]."""
    generator = torch.Generator().manual_seed(Q)
    T = past + Q
    q, k, v = (torch.randn(*shape, D, generator=generator) for shape in ((B, H, G, Q), (B, H, T), (B, H, T)))
    q *= sharpness
    keys = Keys(k, v, torch.arange(T).expand(B, H, T), may_have_empty=False, columns_before=past, ordered=True)
    logits = q.double() @ k.double()[:, :, None].transpose(-1, -2) / D**0.5
    future = torch.ones(Q, T, dtype=torch.bool).triu(past + 1)
    return q, keys, logits.masked_fill(future, -torch.inf).softmax(-1)


def observed(q, keys, threads, lse=None):
    """Sums over a prompt's rows [B,H,T], its output unless lse is given, and each head's blocks, by so many threads."""
    torch.set_num_threads(threads)
    B, H, _, Q, D = q.shape
    sums, blocks, least = torch.zeros(B * H, keys.k_BHTD.shape[2]), {}, []
    out = None if lse is not None else torch.empty_like(q)

    def take(rows):
        sums[rows.first_head : rows.stop_head, rows.first_column : rows.stop_column] += rows.p_NGRM.sum((1, 2))
        for n in range(rows.first_head, rows.stop_head):
            blocks.setdefault(n, []).append((rows.first_row, rows.stop_row, rows.first_column, rows.stop_column))
        least.append(rows.p_NGRM[rows.p_NGRM > 0].min().item())

    rows_BQ = torch.arange(keys.columns_before, keys.columns_before + Q).expand(B, Q)
    torch_backend.observe(q, keys, rows_BQ, Geometry(D**-0.5, None, None), lse, take, out=out)
    return sums.view(B, H, -1), out, blocks, min(least)


@pytest.mark.parametrize("block", [torch_backend.CPU_BLOCK, 20_000])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_and_outputs_are_those_of_the_definition_on_any_number_of_threads(shape, block, monkeypatch):
    monkeypatch.setattr(torch_backend, "CPU_BLOCK", block)
    q, keys, want = inputs(*shape)
    mixed = want @ keys.v_BHTD.double()[:, :, None]
    logits = q.double() @ keys.k_BHTD.double()[:, :, None].transpose(-1, -2) / shape[-1] ** 0.5
    lse = logits.masked_fill(want == 0, -torch.inf).logsumexp(-1).float()
    plan = None
    for threads in THREADS:
        sums, out, blocks, _ = observed(q, keys, threads)
        torch.testing.assert_close(sums.double(), want.sum((2, 3)), atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(out.double(), mixed, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(observed(q, keys, threads, lse)[0], sums, atol=1e-4, rtol=1e-5)
        plan = plan or blocks
        assert blocks == plan, "the sums' order depends on the number of threads"


def test_no_subnormal_number_reaches_products_and_sums():
    """A sharp softmax is full of them, and a CPU takes many times as long for each."""
    q, keys, want = inputs(1, 2, 2, 400, 0, 16, sharpness=25.0)
    assert ((want > 0) & (want < 1e-38)).float().mean() > 0.05
    for threads in (1, 2):
        sums, out, _, least = observed(q, keys, threads)
        assert least >= torch_backend.FLOOR
        torch.testing.assert_close(sums.double(), want.sum((2, 3)), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(out.double(), want @ keys.v_BHTD.double()[:, :, None], atol=1e-4, rtol=1e-4)


def test_small_probabilities_of_a_head_do_not_depend_on_the_heads_beside_it():
    """Which heads share a block depends on the number of threads. In float64 nothing is so small."""
    q, keys, _ = inputs(1, 2, 1, 200, 0, 16, sharpness=12.0)
    q[:, 0] *= 2.5
    one, two = (observed(q, keys, threads) for threads in (1, 3))
    assert torch.equal(one[0], two[0]) and one[3] == two[3]
    keys.k_BHTD, keys.v_BHTD = keys.k_BHTD.double(), keys.v_BHTD.double()
    assert observed(3 * q.double(), keys, 1)[3] < torch_backend.FLOOR


@pytest.mark.parametrize(
    "policy", ["h2o", "roco", "keyformer", "scissorhands", "tova", "snapkv", "adakv", "kvzip", "critical(h2o)"]
)
@pytest.mark.parametrize("name", ["llama_gqa", "mpt", "mistral_sliding"])
def test_the_same_positions_are_kept_on_any_number_of_threads(name, policy):
    model, ids = make(name), prompt(2, 200)
    mask, first = left_pad(ids, [200, 131]), None
    options = {"adakv": {"window": 8, "kernel": 3}, "snapkv": {"window": 8, "kernel": 3}}.get(policy, {})
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        with kvpatch.patched(model, policy, 0.3, **options) as patch:
            model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
            held = [positions.sort(-1).values for positions in patch.report().positions]
        first = first or held
        assert all(torch.equal(one, other) for one, other in zip(first, held, strict=True)), threads
