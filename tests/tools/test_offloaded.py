"""What transformers' offloaded cache moves: each layer comes whole and goes whole, for every token."""

import pytest
import torch

from tests.helpers.tiny import make, prompt
from tools.evidence.offloaded import CountedLayer, count_offloaded


@pytest.mark.parametrize("name", ["llama_gqa", "mistral", "gpt2"])
def test_every_token_reads_and_writes_the_full_cache(name):
    """Of 100 tokens and 4 more: 101.5 of 104 are there on average before a token, and 102.5 after it.

    The first of three layers comes back at the end of the step before, with the newest token.
    """
    read, written = count_offloaded(make(name, layers=3), prompt(1, 100), 4)
    assert read == pytest.approx((101.5 + 1 / 3) / 104) and written == pytest.approx(102.5 / 104)


def test_the_tokens_are_those_of_any_cache():
    model, ids = make("llama_gqa", dtype=torch.float64), prompt(1, 30)
    seen = []
    hook = model.register_forward_hook(lambda _, args, output: seen.append(output.logits[:, -1]))
    count_offloaded(model, ids, 5)
    hook.remove()
    with torch.no_grad():
        want = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None,
            return_dict_in_generate=True, output_logits=True,
        ).logits  # fmt: skip
    torch.testing.assert_close(torch.cat(seen).float(), torch.cat(want), rtol=1e-5, atol=1e-5)


def test_a_layer_that_is_there_is_not_fetched():
    layer = CountedLayer(moved := type("Moved", (), {"read": 0, "written": 0})())
    layer.prefetch()
    layer.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    layer.prefetch()
    assert moved.read == 0
    layer.offload()
    layer.prefetch()
    layer.prefetch()
    assert moved.read == moved.written == 2 * 2 * 3 * 4 * 4
