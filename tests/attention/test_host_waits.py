"""A prompt's end keeps the GPU busy: the host waits for it not at all, or once to read the mask."""

import pytest
import torch

import kvpatch
from kvpatch.backends import torch_backend
from kvpatch.cache import notices, passes
from kvpatch.hooks import inputs
from kvpatch.policies import selection
from tests.helpers.counting import HostWaits
from tests.helpers.tiny import left_pad, make, prompt
from tools.bench.counting import launching, unlaunched

pytestmark = pytest.mark.usefixtures("no_gradients")
POLICIES = (
    "h2o", "roco", "keyformer", "tova", "scissorhands", "snapkv", "pyramidkv", "window", "key_norm", "critical(h2o)", "full",
)  # fmt: skip


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """What is read on the CPU alone is not read: ids and masks at hand, and flags of warnings, which arrive later."""
    for module in (inputs, passes):
        if hasattr(module, "at_hand"):
            monkeypatch.setattr(module, "at_hand", lambda tensor: False)
    monkeypatch.setattr(selection, "_one_for_all", lambda count: None)
    monkeypatch.setattr(torch_backend, "_clear_smallest", lambda p_NGRM: None)
    monkeypatch.setattr(notices.Notices, "say_if", lambda self, flag, name, message: None)


def waits(policy, mask, name="llama_gqa", turns=1, **options):
    """Host waits of prompts, each of which follows the one before."""
    model, found = make(name), []
    with kvpatch.patched(model, policy, 0.5, **options):
        cache = None
        for turn in range(turns):
            ids = prompt(2, 40, seed=turn)
            given = None if mask is None else torch.cat([mask, mask.new_ones(2, 40 * turn)], 1)
            with launching(unlaunched), HostWaits() as counted:  # what kernels compute does not matter
                cache = model(ids, attention_mask=given, past_key_values=cache, use_cache=True).past_key_values
            found.append(dict(counted.at))
        return found


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_of_tokens_alone_waits_for_nothing(policy, backend):
    assert waits(policy, None, backend=backend) == [{}]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_mask_is_read_once(policy):
    ids = prompt(2, 40)
    for mask in (torch.ones_like(ids), left_pad(ids, [40, 29])):
        (found,) = waits(policy, mask)
        assert sum(found.values()) == 1 and "cache/passes.py" in str(found), found


@pytest.mark.parametrize("options", [{"block": 16}, {"schedule": "decode"}, {"positions": "renumbered"}])
def test_other_ways_of_reading_wait_for_nothing(options):
    assert waits("h2o", None, **options) == [{}]


def test_a_further_prompt_is_counted_once_a_layer():
    """Slots may be empty by then; where all tokens were kept, none is."""
    first, *later = waits("h2o", None, turns=3)
    assert first == {} and all(sum(found.values()) == 2 and "compress.py" in str(found) for found in later), later
    assert waits("full", None, turns=3) == [{}] * 3


@pytest.mark.parametrize("policy", ["adakv", "adaptive(h2o)"])
def test_heads_that_share_by_score_are_counted_once_a_layer(policy):
    """How large a head's buffer is hangs on its scores."""
    model = make("llama_gqa")
    (found,) = waits(policy, None, **({"window": 4} if policy == "adakv" else {}))
    assert sum(found.values()) == model.config.num_hidden_layers and "attention/compress.py" in str(found), found


def test_the_counter_counts():
    """Whatever is not counted here would not be missed above."""
    import tests.helpers.counting as counting

    numbers, frame = torch.arange(4), counting.PACKAGE
    counting.PACKAGE = str(__file__)
    try:
        with HostWaits() as found:
            numbers.tolist(), numbers[2].item(), bool(numbers.any()), int(numbers.sum())
            numbers.nonzero(), numbers[numbers > 1], torch.tensor([1, 2], device=numbers.device)
            numbers + 1, torch.tensor([1, 2]), numbers.argsort(), numbers[numbers.argsort()]
    finally:
        counting.PACKAGE = frame
    assert found.total == 7, found.at
