"""Two models whose code lies beside their weights, served as docs/extend/architecture.md says."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

import kvpatch
from kvpatch.arch import adapter as registry
from kvpatch.cli.commands import app
from tests.helpers.tiny import force, left_pad, prompt

CODE = Path(__file__).parents[1] / "helpers" / "remote"
ADAPTER = """

import kvpatch


class OwnAdapter(kvpatch.Adapter):
    name, projection, classes = "own", "out", (OwnAttention,)

    def project(self, attn, hidden, *, tables, **_):
        return attn.project(hidden, *tables)

    def scale(self, attn):
        return 1 / 3.0

    def kv_shape(self, attn):
        return 2, attn.head_dim


kvpatch.register_arch(OwnAdapter(), exist_ok=True)
"""


@pytest.fixture(autouse=True)
def _registry_as_it_was(monkeypatch, tmp_path):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    before = dict(registry.REGISTRY)
    yield
    registry.REGISTRY.clear()
    registry.REGISTRY.update(before)


def folder(path, kind, behind="", old="", new=""):
    """A folder as a hub has it: weights, configuration, and the code that both are of, perhaps with a text behind it."""
    home, stem = path / f"tiny-{kind}", kind.capitalize()
    home.mkdir(exist_ok=True)
    text = (CODE / f"modeling_{kind}.py").read_text()
    assert old in text
    (home / f"modeling_{kind}.py").write_text(text.replace(old, new) + behind)
    classes = {"AutoConfig": f"modeling_{kind}.{stem}Config", "AutoModelForCausalLM": f"modeling_{kind}.{stem}ForCausalLM"}
    (home / "config.json").write_text(json.dumps({"model_type": kind, "auto_map": classes}))
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(home, trust_remote_code=True)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.25)
    model.save_pretrained(home)
    shutil.copy(CODE / f"modeling_{kind}.py", home) if not (behind or old) else None
    return home


def load(home):
    return AutoModelForCausalLM.from_pretrained(home, trust_remote_code=True).eval()


def attention_of(model):
    return type(next(module for module in model.modules() if type(module).__name__.endswith("Attention")))


def is_served(model):
    """k=1.0 and generate() as unpatched, eviction as under a mask, rows as alone: what the checks compare."""
    ids, mask = prompt(2, 20), left_pad(prompt(2, 20), [20, 13])
    asked = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    want, sequences = force(model, ids, prompt(2, 4, seed=2), mask)[0], model.generate(ids, **asked)
    with kvpatch.patched(model, "h2o", 1.0):
        torch.testing.assert_close(force(model, ids, prompt(2, 4, seed=2), mask)[0], want, atol=3e-5, rtol=0)
        assert torch.equal(model.generate(ids, **asked), sequences)
    with kvpatch.patched(model, "h2o", 8) as patch:
        model.generate(ids, **asked)
        assert patch.report().held().max() == 8
    for policy in ("h2o", "critical_snapkv"):
        table = kvpatch.check_model(model, policy, 0.4)
        assert table.passed, table


def checked(home):
    return CliRunner().invoke(app, ["check", str(home), "--trust-remote-code", "--policy", "h2o", "-k", "0.4"])


def test_attention_through_the_interface_is_a_row_or_none(tmp_path):
    home = folder(tmp_path, "routed")
    result = checked(home)  # an automatic row
    assert result.exit_code == 0 and result.stdout.count("pass ") == 7, result.output
    model = load(home)
    kvpatch.register_arch(kvpatch.InterfaceAdapter("routed", attention_of(model), "a decoder from a folder"))
    assert kvpatch.list_architectures()[-1] == "routed"
    is_served(model)


def test_attention_by_hand_is_an_adapter(tmp_path):
    home = folder(tmp_path, "own")
    result = checked(home)
    assert result.exit_code == 2 and "No adapter for OwnForCausalLM" in result.stderr, result.output
    namespace = {"OwnAttention": attention_of(load(home))}
    exec(ADAPTER, namespace)
    is_served(load(home))


def test_an_adapter_behind_the_models_code_serves_the_command_line(tmp_path):
    result = checked(folder(tmp_path, "own", ADAPTER))
    assert result.exit_code == 0 and result.stdout.count("pass ") == 7, result.output


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("past_key_values=None, **kwargs):\n        heads", "past_key_values=None):\n        kwargs = {}\n        heads"),
        ("scaling=self.scaling, **kwargs)", "scaling=self.scaling)"),
    ],
    ids=["takes none", "keeps them"],
)
def test_a_forward_that_hands_nothing_on_is_refused(tmp_path, old, new):
    model = load(folder(tmp_path, "routed", old=old, new=new))
    with pytest.raises(kvpatch.KVPatchError, match="RoutedAttention does not hand its further arguments"):
        kvpatch.patch(model, "h2o", 8)
    kvpatch.register_arch(kvpatch.InterfaceAdapter("routed", attention_of(model)))
    with (
        pytest.raises(kvpatch.KVPatchError, match="RoutedAttention does not hand its further arguments"),
        kvpatch.patched(model, "h2o", 8),
    ):
        model(prompt(1, 12))
