"""Settings: the file, what is refused of it, and what patches make of them."""

import inspect
import json
import warnings

import pytest
import torch

import kvpatch
from kvpatch import KVPatchError, Settings
from kvpatch.evaluation import check
from kvpatch.storage.kinds import SETTINGS as FILE
from kvpatch.storage.settings import LARGEST
from tests.helpers.tiny import make, prompt

pytestmark = pytest.mark.usefixtures("no_gradients")
GIVEN = [
    ("h2o", 0.5, {}),
    ("SnapKV", 6, {"window": 4, "pooling": None, "bits": 8}),
    ("critical(h2o)", "1KiB", {"alpha": 0.25, "positions": "renumbered"}),
    ("keyformer", [0.5, 7], {"tau": [1.0, 2.0], "seed": 3}),
    ("streaming_llm", [[6, 4], [0.5, 3]], {"sinks": 2}),
    ("h2o", kvpatch.Mass(0.9, floor=3, ceiling=0.5), {"recent": 2}),
    ("window", [kvpatch.Share(0.5), 6], {"protect": [5, 6], "schedule": "both"}),
    ("h2o", kvpatch.Threshold(0.01), {"schedule": "prompt", "block": 7, "recent": 2, "strict": True}),
]


@pytest.fixture(scope="module")
def model():
    return make("llama_gqa", dtype=torch.float64)


@pytest.fixture
def path(tmp_path):
    Settings("snapkv", (0.5, 0.3), {"window": 4}).save(tmp_path / "settings.json")
    return tmp_path / "settings.json"


def kept(model, *given, **options):
    with kvpatch.patched(model, *given, **options) as patch:
        cache = patch.new_cache()
        model(prompt(1, 20), past_key_values=cache)
    described = json.loads(json.dumps(patch.settings.described()))
    return [cache.positions(layer).tolist() for layer in range(2)], described


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_they_are_read_as_they_were_written(given, tmp_path):
    settings = Settings(*given)
    settings.save(tmp_path / "settings.json")
    assert Settings.load(str(tmp_path / "settings.json")) == settings
    about = json.loads((tmp_path / "settings.json").read_text())
    assert (about["format"], about["kvpatch"], about["policy"]) == (FILE.format, kvpatch.__version__, given[0])


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_settings_keep_what_their_arguments_keep(model, given, tmp_path):
    policy, k, options = given
    Settings(policy, k, options).save(tmp_path / "settings.json")
    read = Settings.load(tmp_path / "settings.json")
    wanted = kept(model, policy, k, **options)
    assert kept(model, read) == kept(model, policy=read) == wanted
    assert wanted != kept(model, "full")


def test_patch_and_checks_take_them(model, monkeypatch):
    patch = kvpatch.patch(model=model, policy=Settings("h2o", 7), record=True, seed=5)
    patch.remove()
    assert (patch.settings.records_lifetimes, patch.settings.seed, patch.settings.budget.per_layer) == (True, 5, (7, 7))
    given, real = [], check.Checks
    monkeypatch.setattr(check, "Checks", lambda *arguments: given.append(arguments[1:]) or real(*arguments))
    assert kvpatch.check_model(model, Settings("h2o", 9, {"recent": 4, "schedule": "prompt"})).passed
    assert given == [(kvpatch.get_policy("h2o").with_options("prompt", recent=4), 9, 0)]


def test_the_policy_of_settings():
    policy = Settings("snapkv", 0.5, {"window": 4, "schedule": "prompt", "seed": 1}).build_policy()
    assert policy == kvpatch.get_policy("snapkv").with_options("prompt", window=4)
    assert Settings("h2o", 0.5, {"schedule": "prompt"}).build_policy().schedule == "prompt"


def test_numbers_in_texts_and_tensors_and_lists():
    made = Settings("keyformer", [4, [5, 6]], {"tau": [1.0, 2.0]})
    assert (made.k, made.options) == ((4, (5, 6)), {"tau": (1.0, 2.0)})
    assert Settings("h2o", "50%") == Settings("h2o", torch.tensor(0.5).double()) == Settings("h2o")
    assert Settings("h2o", torch.tensor([4, 5])).k == (4, 5)


def test_what_settings_have_is_refused_beside_them(model):
    settings = Settings("snapkv", 0.3, {"window": 4, "seed": 1})
    for k in (0.3, 0.5):  # the default too, where it is given
        for given in ((settings, k), (settings,)):
            more = {} if len(given) == 2 else {"k": k}
            with pytest.raises(KVPatchError, match=rf"k={k} is given beside Settings with k=0\.3: give k in the Settings, or"):
                kvpatch.patched(model, *given, **more)
        with pytest.raises(KVPatchError, match="is given beside Settings with k="):
            kvpatch.check_model(model, settings, k)
    for name, value, own in (("window", 8, 4), ("seed", 0, 1)):
        with pytest.raises(KVPatchError, match=f"{name}={value} is given beside Settings with {name}={own}: leave it out"):
            kvpatch.patch(model, settings, **{name: value})
    assert kept(model, settings, kernel=3)[0] == kept(model, "snapkv", 0.3, window=4, kernel=3)[0]
    with pytest.raises(KVPatchError, match="no option 'windw'"):
        kvpatch.patched(model, settings, windw=8)
    with pytest.raises(KVPatchError, match=r"tests a policy and k, not seed=1 of the Settings: leave seed out"):
        kvpatch.check_model(model, settings)
    for policy, twice in ((settings, {"policy": "h2o"}), ("h2o", {"policy": settings}), (settings, {"model": model})):
        with pytest.raises(TypeError, match=f"multiple values for argument '{next(iter(twice))}'"):
            kvpatch.patched(model, policy, **twice)


def test_the_line_of_the_caller_is_warned_of(model):
    for given in (("h2o", 1), (Settings("h2o", 1),)):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            block = kvpatch.patched(model, *given)
        assert [one.filename for one in found] == [__file__]
        with block:
            pass
    assert list(inspect.signature(kvpatch.patched).parameters)[:3] == ["model", "policy", "k"]


REFUSED = [
    (("h20",), r"Unknown policy 'h20'\. Did you mean 'h2o'"),
    ((kvpatch.get_policy("h2o"),), "is no name that a file can hold: give one of list_policies"),
    (("adaptive(" * 60 + "h2o" + ")" * 60,), "is no name that a file can hold"),
    (("h2o", 7.5), r"k=7\.5 is not a share"),
    (("h2o", [0.5, 1.5]), r"k\[1\]=1\.5 is not a share"),
    (("h2o", [0.5, []]), r"k\[1\]=\[\] is empty"),
    (("h2o", [[[3]]]), r"k\[0\]\[0\]=\[3\] is not a budget"),
    (("h2o", True), "k=True is not a budget"),
    (("h2o", None), "k=None is not a budget"),
    (("h2o", 0.5, [("recent", 4)]), r"options=\[.* is no dict"),
    (("h2o", 0.5, {"recnt": 4}), r"policy 'h2o' have no option 'recnt'\. Did you mean 'recent'\? They have: bits, "),
    (("h2o", 0.5, {"k": 4}), "no option 'k'"),
    (("h2o", 0.5, {"record": True}), "no option 'record'"),
    (("h2o", 0.5, {"recent": -1}), "recent=-1"),
    (("h2o", 0.5, {"schedule": "never"}), "schedule='never' must be one of"),
    (("q_filter", 0.5, {"calibration": object()}), "calibration=<obj.*, which a JSON file cannot hold: give cal"),
    (("h2o", 0.5, {"recent": float("inf")}), "recent=inf, which a JSON file cannot hold"),
]


@pytest.mark.parametrize(("given", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_what_is_refused(given, says):
    with pytest.raises(KVPatchError, match=f"(?s){says}"):
        Settings(*given)


def test_a_budget_of_ones_own_kind():
    class Mine(kvpatch.Share):
        pass

    with pytest.raises(KVPatchError, match=r"is of no kind that a file can hold: give a number, a size, or Mass, Share, Thr"):
        Settings("h2o", Mine(0.5))


BAD = [
    ({"format": "kvpatch settings 0"}, f"not of this version of kvpatch ..{FILE.format}"),
    ({"more": 1}, "more"),
    ({"policy": 3}, "policy of type int is no name"),
    ({"policy": "h20"}, "Unknown policy 'h20'"),
    ({"options": {"windw": 4}}, "no option 'windw'"),
    ({"options": {"window": {}}}, "window={}, which a JSON file cannot hold"),
    ({"options": {"window": "4"}}, "window='4'"),
    ({"options": [4]}, r"options=\[4\] is no dict"),
    ({"k": "much"}, "k='much' is not a size"),
    ({"k": None}, "k=None is not a budget"),
    ({"k": {"Most": {}}}, r"its k names \['Most'\] where one of Mass, Share, Threshold belongs"),
    ({"k": {}}, r"its k names \[\]"),
    ({"k": {"Share": {"part": 0.5}}}, r"its Share has \['part'\] where \['part', 'of'\] belong"),
    ({"k": {"Share": 0.5}}, "its Share has 'float'"),
    ({"k": [{"Threshold": {"x": -1}}]}, r"Threshold\(-1\): give a score"),
]


@pytest.mark.parametrize(("change", "says"), BAD, ids=[says for _, says in BAD])
def test_a_file_that_is_none(path, change, says):
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(KVPatchError, match=rf"(?s)no valid settings file: .*{says}.*\. Write it anew with Settings\.save or"):
        Settings.load(path)


def test_a_damaged_file_and_none(path, tmp_path):
    text = path.read_text()
    without = json.loads(text)
    del without["k"]
    nested = text.replace("[\n    0.5", "[" * 500 + "0.5" + "]" * 500 + ", [0.5")
    contents = (
        text[:40],
        "[]",
        "[" * 100_000,
        json.dumps(without),
        text.replace("0.3", "NaN"),
        nested,
    )
    for content in (b"\xff\xfe", *map(str.encode, contents)):
        path.write_bytes(content)
        with pytest.raises(KVPatchError, match="no valid settings file"):
            Settings.load(path)
    path.write_text(text + " " * LARGEST)
    with pytest.raises(KVPatchError, match="no valid settings file: it has more than 4,194,304 bytes"):
        Settings.load(path)
    with pytest.raises(KVPatchError, match=r"There is no file .*none: give one that Settings\.save wrote"):
        Settings.load(tmp_path / "none")
    for given in (3, ""):
        with pytest.raises(KVPatchError, match=r"is no path: give the file that Settings\.save wrote"):
            Settings.load(given)
    with pytest.raises(KVPatchError, match="The settings file was not saved to"):
        Settings("h2o").save(tmp_path / "none" / "settings.json")
