"""Rows in an engine's pages on the Triton kernels, which read and write them where they lie."""

from tests.backends import on_triton  # isort: skip  # before a kernel is defined

import pytest
import torch

import kvpatch
from kvpatch.cache.paged import PagedSlots
from kvpatch.serving.rows import RowPool
from tests.cache.test_paged import copied, paged, pool_of
from tests.helpers.joined import same_kept
from tests.helpers.serving import prompts
from tests.helpers.tiny import make

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.mark.parametrize(("policy", "P", "options"), [("h2o", 13, {}), ("roco", 5, {}), ("snapkv", 8, {"window": 4})])
@pytest.mark.parametrize("together", [True, False])
def test_steps_copy_nothing(monkeypatch, policy, P, options, together):
    """One page of each row, or several; rows at their budget and below it; victims named by kernels, or none."""
    model, texts = make("llama_gqa").to(on_triton.DEVICE), prompts((20, 9, 15))
    with kvpatch.patched(model, policy, 12, backend="triton", **options) as patch:
        rows, alone = RowPool(), []
        pools = [pool_of(17, P, on_triton.DEVICE, torch.nan) for _ in range(2)]
        for index, ids in enumerate(texts):
            pages, each = [*range(1 + index, 17, 3)], 24 // P + 1
            own = range(1 + index * each, 1 + (index + 1) * each) if together else pages[:each]
            cache = paged(patch.new_cache(), pools, own, on_triton.DEVICE)
            alone.append(patch.new_cache())
            for one in (cache, alone[-1]):
                model(torch.tensor([ids], device=on_triton.DEVICE), past_key_values=one)
            rows.add(str(index), cache)
        monkeypatch.setattr(PagedSlots, "_read_strips", copied)
        here = rows.gather([str(index) for index in range(len(texts))])
        for step in range(6):
            fed = torch.tensor([[5 + 7 * step + int(name)] for name in here.names], device=on_triton.DEVICE)
            logits = model(fed, past_key_values=here.cache).logits[:, -1]
            assert here.cache.backend_choice.ran_last["decode"][0] == "triton"
            for row, name in enumerate(here.names):
                own = model(fed[row : row + 1], past_key_values=alone[int(name)]).logits[0, -1]
                assert torch.allclose(logits[row], own, atol=1e-5), (step, name)
                same_kept(here.cache, row, alone[int(name)])
        assert not any(bool(pool[:, :2].any()) for pool in pools), "page 0 is nobody's"
