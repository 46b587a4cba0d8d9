"""Importing kvpatch changes nothing of other libraries, in a process of its own: docs/architecture.md says what it adds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOOK = """
import importlib, json, logging, os, pkgutil, signal, sys, types, warnings

import accelerate, einops, torch, torch._dynamo, transformers, transformers.generation.continuous_batching
from transformers import AttentionInterface, PreTrainedConfig, TextStreamer  # which transformers finds when first asked
from transformers.masking_utils import AttentionMaskInterface

OTHERS = ("torch", "transformers", "einops", "accelerate")


def look_at_modules():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in OTHERS and isinstance(module, types.ModuleType):
            for key, value in vars(module).items():
                if not isinstance(value, types.ModuleType):  # a module that is imported becomes one of its package
                    found[f"{name}.{key}"] = value
                if isinstance(value, type) and value.__module__ == name:
                    found.update({f"{name}.{key}.{own}": one for own, one in vars(value).items()})
    return found


def look_at_state():
    loggers = logging.root.manager.loggerDict
    return {
        "attention functions": sorted(AttentionInterface._global_mapping),
        "mask functions": sorted(AttentionMaskInterface._global_mapping),
        "torch": [torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()],
        "random numbers": torch.get_rng_state().tolist(),
        "matmul": [torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32, torch.get_num_threads()],
        "warnings": list(map(str, warnings.filters)),
        "environment": dict(os.environ),
        "finders": [one for one in sys.meta_path if type(one).__module__ != "six"],  # which whoever imports it first brings
        "hooks": [sys.excepthook, *sys.path, *sys.path_hooks, signal.getsignal(signal.SIGINT)],
        "logging": {
            name: (one.level, one.propagate, list(one.handlers))
            for name, one in [*loggers.items(), ("", logging.root)]
            if isinstance(one, logging.Logger) and name in known  # modules that are imported later get loggers of their own
        },
    }


known = {"", *logging.root.manager.loggerDict}
modules, state = look_at_modules(), look_at_state()
import kvpatch

NEED_MORE = ("kvpatch.serving.vllm.", "kvpatch.evaluation.lm_eval", "kvpatch.backends.triton.")
RUN = ("kvpatch.__main__", "kvpatch.cli.main")
names = [one.name for one in pkgutil.walk_packages(kvpatch.__path__, "kvpatch.")]
names = [name for name in names if not name.startswith(NEED_MORE) and name not in RUN]
for name in names:
    importlib.import_module(name)
later, told = look_at_modules(), look_at_state()
changed = [name for name, one in modules.items() if later.get(name) is not one and not name.endswith("__warningregistry__")]
changed += [name for name in state if str(state[name]) != str(told[name])]
print(json.dumps({"imported": len(names), "changed": changed}))
"""


@pytest.fixture(scope="module")
def found():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", LOOK], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_every_module_changes_nothing_of_others(found):
    assert found["imported"] > 100 and found["changed"] == []


def test_every_module_that_writes_to_another_library_s_registry_is_explained():
    """By name: whatever registers with another library is in the section of docs/architecture.md."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    said = page.partition("## What importing kvpatch changes")[2].partition("\n## ")[0]
    for words, where in (
        ("AttentionInterface.register", "arch/interface.py"),
        ("torch.library.custom_op", "backends/triton/triton_backend.py"),
        ("@register_model(", "evaluation/lm_eval.py"),
        ("KVCacheSpecRegistry.register", "serving/vllm/pages.py"),
        ("register_backend(", "serving/vllm/plugin.py"),
        ("_replace_attribute(", "cli/serving.py"),
        ("set_verbosity_error()", "cli/loading.py"),  # of transformers' log
    ):
        files = [path for path in (ROOT / "kvpatch").rglob("*.py") if words in path.read_text()]
        assert files == [ROOT / "kvpatch" / where], words
        assert f"`{where}`" in said, where
