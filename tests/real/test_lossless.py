"""lossless=True on a pretrained model: its own tokens, and fewer bytes than transformers' offloaded cache moves for them."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvpatch
from kvpatch.arch.upstream import cache_of
from tests.real.test_real_model import ask
from tools.evidence.offloaded import count_offloaded

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("no_gradients")]


def test_a_token_moves_at_most_a_quarter_of_what_an_offloaded_cache_moves(real_name):
    """At k=0.1, counted in the same process; ours writes the entries of every verified token, accepted or not."""
    model = AutoModelForCausalLM.from_pretrained(real_name, dtype=torch.float32).eval()
    ids = ask(AutoTokenizer.from_pretrained(real_name), 400, "Explain to a beginner what this text says.")
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 48, "min_new_tokens": 48, "do_sample": False}
    want = model.generate(ids, **options)
    read, written = count_offloaded(model, ids, 2)
    with kvpatch.patched(model, "h2o", 0.1, lossless=True):
        out = model.generate(ids, return_dict_in_generate=True, **options)
    assert torch.equal(out.sequences, want)
    cache, own = cache_of(out), cache_of(out).verified
    verified = (own.drafted + own.passes) / (own.accepted + own.passes)
    ours = own.nbytes_per_token / cache.nbytes, verified / len(cache.ids)
    assert 0.99 < read <= 1 and 0.99 < written <= 1
    assert sum(ours) <= 0.25 * (read + written) and sum(ours) <= 0.25
