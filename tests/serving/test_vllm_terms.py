"""The settings of a budget in vLLM's configuration: read and refused without vLLM."""

import json
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

import kvpatch
from kvpatch.serving.vllm import plugin
from kvpatch.serving.vllm.terms import configured, terms_of


def test_settings():
    terms = terms_of({"policy": "H2O", "k": 1024, "recent": 0.3, "seed": 7, "positions": "original"})
    assert (terms.policy.name, terms.k, terms.seed, terms.policy.options()["recent"]) == ("h2o", 1024, 7, 0.3)
    assert terms_of({"policy": "snapkv", "k": 64, "window": 8}).policy.schedule == "prompt"
    assert terms_of({"policy": "h2o", "k": 64, "schedule": "prompt"}).policy.schedule == "prompt"


def test_where_they_are_given():
    given = {"policy": "h2o", "k": 16}
    assert configured({}, None) is None and configured({"other": 1}, "") is None and configured(None, None) is None
    for found in (configured({"kvpatch": given}, None), configured({}, json.dumps(given))):
        assert found is not None and found.k == 16
    with pytest.raises(kvpatch.KVPatchError, match=r"Both additional_config.*leave one out"):
        configured({"kvpatch": given}, json.dumps(given))
    with pytest.raises(kvpatch.KVPatchError, match=r"KVPATCH_VLLM='h2o' is not JSON.*write KVPATCH_VLLM="):
        configured({}, "h2o")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("h2o", "must be an object of settings"),
        ({"policy": "h2o"}, "settings lack k: --additional-config"),
        ({"polcy": "h2o", "k": 3}, "no setting 'polcy'. Did you mean 'policy'?"),
        ({"policy": "h2p", "k": 3}, "Unknown policy 'h2p'. Did you mean 'h2o'?"),
        ({"policy": "h2o", "k": 3, "recnt": 1}, "no option 'recnt'. Did you mean 'recent'?"),
        ({"policy": "h2o", "k": 3, "sede": 1}, "no setting 'sede'. Did you mean 'seed'?"),
        ({"policy": "h2o", "k": [3, 4]}, "all layers have one budget"),
        ({"policy": "h2o", "k": kvpatch.Mass(0.9)}, "claims its pages at once: give tokens, a share or a size"),
        ({"policy": "h2o", "k": 1.0}, "keeps everything, as vLLM does without kvpatch"),
        ({"policy": "h2o", "k": 1.5}, "not a share in (0, 1]"),
        ({"policy": "h2o", "k": "3MeB"}, "not a size"),
        ({"policy": "h2o", "k": 0}, "k=0 tokens keeps nothing"),
        ({"policy": "h2o", "k": 3, "seed": "x"}, "seed='x' must be an int"),
        ({"policy": "h2o", "k": 3, "block": 64}, "max_num_batched_tokens is their size"),
        ({"policy": "h2o", "k": 3, "bits": 4}, "bits=4 is not served"),
        ({"policy": "h2o", "k": 3, "protect": [1]}, "sees no token ids"),
        ({"policy": "h2o", "k": 3, "positions": "renumbered"}, "use 'original'"),
        ({"policy": "h2o", "k": 3, "schedule": "decode"}, 'Give "schedule": "both"'),
        ({"policy": "h2o", "k": 3, "schedule": "bth"}, "Did you mean 'both'?"),
        ({"policy": "adakv", "k": 3}, "heads hold different numbers of tokens, and a page has one: use 'snapkv'"),
        ({"policy": "adaptive(h2o)", "k": 3}, "heads hold different numbers of tokens"),
        ({"policy": "pyramidkv", "k": 0.5}, "pages for the longest prompt: give k as a number of tokens or a size"),
        ({"policy": "global_topk(h2o)", "k": 3}, "heads hold different numbers of tokens"),
        ({"policy": "full", "k": 3}, "evicts nothing, as vLLM does without kvpatch"),
        ({"policy": "expected_attention", "k": 3}, "use 'key_diff' or 'key_norm'"),
        ({"policy": "h2o", "k": 3, "every": 2}, "every= lets tokens wait"),
        ({"policy": "r_kv", "k": 30, "every": 1}, "it keeps a layer's last queries"),
        ({"policy": "q_filter", "k": 3}, "it needs a calibration"),
        ({"policy": "snapkv", "k": 3, "window": 1, "turns": "first"}, "turns= tells prompts of a chat apart"),
    ],
)
def test_refused(given, words):
    with pytest.raises(kvpatch.KVPatchError) as refused:
        terms_of(given)
    assert words in str(refused.value)


def test_the_plugin_imports_little():
    """vLLM loads it in every process, also where no budget is asked for."""
    look = "import sys, kvpatch.serving.vllm.plugin; print({'torch', 'transformers', 'vllm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


NAMES = ("CPU_ATTN", "CPU_MLA", "AMX_MLA", "FLASH_ATTN", "CUSTOM")
BUDGET = '{"policy": "h2o", "k": 16}'


@pytest.fixture
def registered(monkeypatch):
    """Run the plugin beside a stub of vLLM; returns what its registry then has. taken: by another plugin."""

    class Member:
        def __init__(self, name):
            self.name = name

        def is_overridden(self):
            return self.name in named

        def get_path(self):
            return named[self.name]

    class Members(dict):
        def __iter__(self):
            return iter(self.values())

        CUSTOM = property(lambda self: self["CUSTOM"])

    named = {}

    def run(platform, variable, taken=None):
        named.update({"CUSTOM": taken} if taken else {})
        platforms, registry = ModuleType("vllm.platforms"), ModuleType("vllm.v1.attention.backends.registry")
        platforms.current_platform = SimpleNamespace(is_cpu=lambda: platform == "cpu", is_cuda=lambda: platform == "cuda")
        registry.AttentionBackendEnum = Members({name: Member(name) for name in NAMES})
        registry.register_backend = lambda member, path: named.__setitem__(member.name, path)
        for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        for module in (platforms, registry):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setenv("KVPATCH_VLLM", variable)
        plugin.register()
        return named

    run.named = named
    return run


@pytest.mark.parametrize(
    ("platform", "variable", "found"),
    [
        ("cpu", "", plugin.CPU),
        ("cpu", BUDGET, plugin.CPU),
        ("cuda", "", {"CUSTOM": plugin.CUDA}),
        ("cuda", BUDGET, dict.fromkeys(NAMES, plugin.CUDA)),
        ("rocm", "", {}),
    ],
)
def test_the_plugin_registers(registered, platform, variable, found):
    """On CUDA all of vLLM's own backends stay where no settings are known."""
    assert registered(platform, variable) == found
    assert registered(platform, variable) == found, "vLLM may run it again"


def test_a_backend_of_another_plugin(registered):
    assert registered("cuda", "", taken="other.Backend") == {"CUSTOM": "other.Backend"}
    with pytest.raises(kvpatch.KVPatchError, match=r"KVPATCH_VLLM is set, but another plugin.*\(other.Backend\): unset it"):
        registered("cuda", BUDGET, taken="other.Backend")


def test_a_budget_is_refused_where_none_is_served(registered):
    with pytest.raises(kvpatch.KVPatchError, match=r"this is neither: unset it, or use transformers' server"):
        registered("rocm", BUDGET)
    assert not registered.named
