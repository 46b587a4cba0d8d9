"""torch.set_default_device() and `with torch.device(...)` around a run: numbers of the host stay there, whatever the default.

The default here is "meta", where no number can be read. https://github.com/huggingface/transformers/issues/31833
"""

import ast
from pathlib import Path

import pytest
import torch

import kvpatch
from tests.helpers.tiny import make, prompt

pytestmark = pytest.mark.usefixtures("no_gradients")
PACKAGE = Path(kvpatch.__file__).parent
MAKERS = {
    "tensor",
    "arange",
    "zeros",
    "ones",
    "full",
    "empty",
    "randperm",
    "eye",
    "linspace",
    "as_tensor",
    "rand",
    "randn",
    "randint",
}
HOSTS_OF_THEIR_OWN = ("cli", "planning", "vllm", "triton", "twin.py")
CALIBRATED = ("q_filter", "duo", "learned", "tri_attention")
RARE = ("lazy", "r_kv", "vase")  # which evict many tokens at a time


def list_bare_calls(text):
    """Lines in which torch makes a tensor on the default device."""
    for node in ast.walk(ast.parse(text)):
        made = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKERS
        named = made and any(keyword.arg in ("device", None) for keyword in node.keywords)
        if made and not named and isinstance(node.func.value, ast.Name) and node.func.value.id == "torch":
            yield node.lineno


def test_every_tensor_is_made_on_a_device_that_is_named():
    files = [path for path in PACKAGE.rglob("*.py") if not set(path.relative_to(PACKAGE).parts) & set(HOSTS_OF_THEIR_OWN)]
    assert len(files) > 100
    assert {str(path): lines for path in files if (lines := list(list_bare_calls(path.read_text())))} == {}
    assert list(list_bare_calls("torch.zeros(3)\ntorch.zeros(3, device=d)\ntorch.zeros(**like)")) == [1]


def read_and_write(model, policy, **options):
    """Logits of a prompt of two rows and six steps."""
    torch.manual_seed(0)
    ids, fed = prompt(2, 30), prompt(2, 6, seed=3)
    with kvpatch.patched(model, policy, 12, **options) as patch:
        cache = patch.new_cache()
        return [model(ids, past_key_values=cache).logits, *(model(t, past_key_values=cache).logits for t in fed.split(1, 1))]


@pytest.mark.parametrize("policy", [one for one in kvpatch.list_policies() if one not in (*CALIBRATED, *RARE)])
def test_every_policy(policy):
    model = make("llama_gqa")
    want = read_and_write(model, policy)
    with torch.device("meta"):
        got = read_and_write(model, policy)
    assert all(map(torch.equal, want, got))


@pytest.mark.parametrize(
    "options",
    [
        {"block": 7},
        {"bits": 4},
        {"positions": "renumbered"},
        {"protect": [3, 5]},
        {"quota": [(0, 5), (5, 9)]},
        {"record": True},
    ],
    ids=str,
)
def test_options(options):
    model = make("llama_gqa")
    want = read_and_write(model, "h2o", **options)
    with torch.device("meta"):
        got = read_and_write(model, "h2o", **options)
    assert all(map(torch.equal, want, got))


def _edit(model, patch, cache, path):
    cache.forget([(2, 5)])
    patch.replace(cache, (6, 9), [3, 4, 5], reread=2)


def _save(model, patch, cache, path):
    patch.save_cache(cache, path)
    return patch.load_cache(path)


def _join(model, patch, cache, path):
    other = patch.new_cache()
    model(prompt(2, 9), past_key_values=other)
    joined = kvpatch.EvictingCache.concatenate([cache, other])
    joined.batch_select_indices([0, 3])
    return joined


def _roll_back(model, patch, cache, path):
    cache.activate_past_recording()
    for token in prompt(2, 2, seed=4).split(1, 1):
        model(token, past_key_values=cache)
    cache.crop(-1)


def _look_up(model, patch, cache, path):
    return model.generate(prompt(1, 30), max_new_tokens=5, do_sample=False, pad_token_id=0, prompt_lookup_num_tokens=3)


def _begin(model, patch, cache, path):
    return patch.prefix(prompt(1, 30)[0].tolist()).copy()


@pytest.mark.parametrize("do", [_edit, _save, _join, _roll_back, _look_up, _begin])
def test_what_is_done_with_a_cache(do, tmp_path):
    model = make("llama_gqa")

    def run():
        with kvpatch.patched(model, "h2o", 12) as patch:
            cache = patch.new_cache()
            model(prompt(2, 30), past_key_values=cache)
            found = do(model, patch, cache, tmp_path / "cache.safetensors")
            if isinstance(found, torch.Tensor):
                return found
            cache = cache if found is None else found
            return model(prompt(len(cache.lengths_B), 1, seed=5), past_key_values=cache).logits

    want = run()
    with torch.device("meta"):
        got = run()
    assert torch.equal(want, got)


def test_lossless():
    model = make("llama_gqa")
    want = model.generate(prompt(1, 30), max_new_tokens=12, do_sample=False, pad_token_id=0)
    with torch.device("meta"), kvpatch.patched(model, "h2o", 12, lossless=True):
        assert torch.equal(model.generate(prompt(1, 30), max_new_tokens=12, do_sample=False, pad_token_id=0), want)


def test_what_checks_and_draws():
    model = make("llama_gqa")
    with kvpatch.patched(model, "h2o", 12) as patch:
        model(prompt(2, 30), use_cache=True)
    with torch.device("meta"):
        assert kvpatch.check_model(model, "h2o", 0.5).passed
        assert patch.report().plot() is not None
