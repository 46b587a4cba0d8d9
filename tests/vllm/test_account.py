"""What a scheduler counts of its requests, and another manager for pages under a budget, which is refused."""

from types import SimpleNamespace

import pytest
import torch

import kvpatch

pytest.importorskip("vllm")

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import KVCacheGroupRole
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvpatch.serving.vllm.account import BudgetLog
from kvpatch.serving.vllm.figures import ROWS, Figures
from kvpatch.serving.vllm.pages import BudgetSpec, LayerBudget, check_manager
from kvpatch.serving.vllm.terms import OWN

LAYERS = 3


def spec(budget=24, grows=False, bound=False, most=40):
    return BudgetSpec(
        block_size=16,
        num_kv_heads=2,
        head_size=32,
        dtype=torch.float32,
        held=LayerBudget(budget, grows, bound, most),
        longest=512,
    )


def account(folder, *groups):
    """An account whose groups have these specs, with so many layers each."""
    made = [SimpleNamespace(layer_names=["one"] * layers, kv_cache_spec=one) for layers, one in groups]
    kv = SimpleNamespace(kv_cache_groups=made, num_blocks=101)
    told = SimpleNamespace(additional_config={}, parallel_config=None, scheduler_config=None)
    return BudgetLog(SimpleNamespace(kv_cache_config=kv, vllm_config=told), Figures(str(folder)))


def request(prompt, written, computed=None, own=None, ended=True):
    return SimpleNamespace(
        num_prompt_tokens=prompt,
        num_tokens=prompt + written,
        num_computed_tokens=prompt + written if computed is None else computed,
        sampling_params=SimpleNamespace(extra_args=None if own is None else {OWN: own}),
        is_finished=lambda: ended,
    )


@pytest.mark.parametrize(
    ("groups", "ended", "seen", "held"),
    [
        ([(LAYERS, spec())], request(100, 8), 107, 24),
        ([(LAYERS, spec())], request(10, 8), 17, 17),
        ([(LAYERS, spec())], request(100, 8, own=40), 107, 40),
        ([(LAYERS, spec())], request(100, 8, own=41), 107, 24),
        ([(LAYERS, spec())], request(100, 0, computed=64), 64, 24),
        ([(LAYERS, spec(grows=True))], request(100, 8), 107, 31),
        ([(2, spec()), (1, spec(48, bound=True))], request(100, 8), 107, 32),
        ([(2, spec()), (1, spec(48, bound=True))], request(100, 8, own=12), 107, 24),
    ],
)
def test_a_request_that_has_ended(tmp_path, groups, ended, seen, held):
    """Of layers that differ the mean counts; a window is the same under each k. The last token is not read."""
    kept = account(tmp_path, *groups)
    kept.note_end(ended)
    found = {name: kept.figures.values[f"{name}_tokens"] for name in ("seen", "held", "evicted")}
    assert found == {"seen": seen, "held": pytest.approx(held), "evicted": pytest.approx(seen - held)}
    assert kept.figures.values["compressed_requests"] == (seen > held) and kept.figures.values["ended_requests"] == 1


def test_what_else_is_counted(tmp_path):
    """Prompts that a pass cuts; not a request that goes on."""
    kept = account(tmp_path, (LAYERS, spec()))
    kept.note_end(request(100, 8, ended=False))
    for tokens in (64, 99, 100, 101):
        kept.note_pass(request(100, 0), tokens, begins=tokens == 64)
    values = kept.figures.values
    assert values == {**dict.fromkeys(ROWS, 0), "prompt_cuts": 2, "blocks": 100}


def test_another_manager_is_refused(monkeypatch):
    check_manager(spec())
    monkeypatch.setattr(
        "vllm.v1.kv_cache_spec_registry._REGISTRY_ROLE_MANAGERS", {KVCacheGroupRole.DEFAULT: FullAttentionManager}
    )
    assert KVCacheSpecRegistry.get_manager_class(spec(), KVCacheGroupRole.DEFAULT) is FullAttentionManager
    with pytest.raises(kvpatch.KVPatchError, match="would be managed by FullAttentionManager, which another plugin has"):
        check_manager(spec())
