"""The names of vLLM's that the plugin takes are in the installed version; what a version lacks is found."""

from pathlib import Path

import pytest

from tools.reliability import vllm_names

vllm = pytest.importorskip("vllm")
INSTALLED = Path(vllm.__file__).parents[1]


def test_the_installed_version_has_all():
    count, missing = vllm_names.look_up(INSTALLED)
    assert count > 140 and not missing


def test_what_is_missing_is_found(tmp_path, monkeypatch):
    """A module without a name, a class without an attribute, a method that is told more, and a package without modules."""
    (tmp_path / "vllm").symlink_to(INSTALLED / "vllm")
    monkeypatch.setattr(vllm_names, "READ", {"vllm.v1.core.block_pool:BlockPool": "blocks touch_all"})
    plugin = tmp_path / "plugin"
    plugin.mkdir()
    (plugin / "own.py").write_text(
        "from vllm.config import NoConfig, VllmConfig\n"
        "from vllm.v1.attention.backend import AttentionMetadataBuilder as Base\n"
        "class Own(Base[int]):\n    def build(self, common_prefix_len): ...\n"
    )
    monkeypatch.setattr(vllm_names, "PLUGIN", plugin)
    assert vllm_names.look_up(tmp_path)[1] == [
        "own.py: vllm.config has no NoConfig",
        "vllm.v1.core.block_pool:BlockPool has no touch_all",
        "own.py Own.build is told common_attn_metadata, fast_build, too",
    ]
    count, missing = vllm_names.look_up(plugin)
    assert len(missing) == count
