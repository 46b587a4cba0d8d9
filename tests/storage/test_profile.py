"""Profiles: the file, what is refused of it, and patched(profile=)."""

import dataclasses
import json

import pytest
import torch

import kvpatch
from kvpatch import KVPatchError, Profile
from kvpatch.hooks.target import Target
from kvpatch.storage.file import checksum
from kvpatch.storage.profile import FORMAT, LARGEST, changed, load_profile, save_profile
from tests.helpers.tiny import make, prompt

pytestmark = pytest.mark.usefixtures("no_gradients")
MEASURED = {"tokens": 90, "pieces": 2, "tolerance": 0.05, "kl": 0.04, "share": 0.3, "unseen_kl": None}


@pytest.fixture(scope="module")
def model():
    return make("llama_gqa", dtype=torch.float64)


@pytest.fixture(scope="module")
def profile(model):
    return Profile(Target.find(model).identity(), "adaptive(snapkv)", {"floor": 0.5, "window": 4}, (0.5, 0.3), MEASURED)


@pytest.fixture
def path(profile, tmp_path):
    save_profile(profile, tmp_path / "profile.json")
    return tmp_path / "profile.json"


def rewritten(path, change):
    """The file with other values, under a right checksum."""
    about = json.loads(path.read_text())
    del about["checksum"]
    change(about)
    path.write_text(json.dumps(about | {"checksum": checksum(json.dumps(about, sort_keys=True), {})}))


def kept(model, **given):
    with kvpatch.patched(model, **given) as patch:
        cache = patch.new_cache()
        model(prompt(1, 20), past_key_values=cache)
    return [cache.positions(layer).tolist() for layer in range(2)]


@pytest.mark.parametrize("k", [(0.5, 0.3), (6, 0.3), ([6, 4], 5), 0.4])
def test_it_is_read_as_it_was_written(model, profile, tmp_path, k):
    own = dataclasses.replace(profile, policy="snapkv", options={"window": 4}, k=k)
    save_profile(own, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == own == kvpatch.load_profile(str(tmp_path / "profile.json"))
    wanted = kept(model, policy="snapkv", k=k, window=4)
    assert kept(model, profile=tmp_path / "profile.json") == kept(model, profile=own) == wanted


def test_options_and_k_of_the_profile_are_used(model, path):
    used = kept(model, profile=path)
    assert used == kept(model, policy="adaptive(snapkv)", k=[0.5, 0.3], floor=0.5, window=4)
    assert used != kept(model, policy="adaptive(snapkv)", k=[0.3, 0.5], floor=0.5, window=4)


def test_options_that_differ():
    policy = kvpatch.get_policy("snapkv").with_options(window=8, kernel=3)
    assert changed("snapkv", policy) == {"window": 8, "kernel": 3}
    assert changed("h2o", kvpatch.get_policy("h2o")) == {}


BAD = [
    (lambda about: about.update(format="kvpatch profile 0"), f"not of this version of kvpatch ..{FORMAT}"),
    (lambda about: about.update(more=1), "more"),
    (lambda about: about.update(model=[]), "names no model"),
    (lambda about: about.update(policy=3), "names no policy"),
    (lambda about: about.update(policy="h20"), "Unknown policy 'h20'"),
    (lambda about: about.update(policy="adaptive(" * 60 + "h2o" + ")" * 60), "names no policy"),
    (lambda about: about.update(options={"flor": 0.5}), "no option 'flor'"),
    (lambda about: about.update(options={"schedule": "both"}), "its options have a schedule"),
    (lambda about: about.update(options={"floor": 7}), "floor=7 must be a share"),
    (lambda about: about.update(k=[0.5]), "its k has 1 entries, where one for each of 2 layers belongs"),
    (lambda about: about.update(k="2GiB"), "its k is no list"),
    (lambda about: about.update(k=7.5), r"its k=7\.5 is not a share"),
    (lambda about: about.update(k=[0.5, 1.5]), r"its k\[1\]=1\.5 is not a share"),
    (lambda about: about.update(k=[0.5, "1GiB"]), r"its k\[1\] holds '1GiB', which is neither"),
    (lambda about: about.update(k=[0.5, []]), r"its k\[1\] is empty"),
    (lambda about: about["measured"].update(kl=float("nan")), "kl|NaN"),
    (lambda about: about["measured"].update(pieces=0), "measured says pieces is 0"),
    (lambda about: about["measured"].update(kl=None), "measured says kl is None"),
]


@pytest.mark.parametrize(("change", "says"), BAD, ids=[says for _, says in BAD])
def test_a_file_that_is_none(path, change, says):
    rewritten(path, change)
    with pytest.raises(KVPatchError, match=f"(?s)no valid profile: .*{says}.*kvpatch tune"):
        load_profile(path)


def test_an_altered_file_and_none(path, tmp_path):
    text = path.read_text()
    path.write_text(text.replace("0.3", "0.4"))
    with pytest.raises(KVPatchError, match="its checksum does not match, so it was altered"):
        load_profile(path)
    for content in (text[:40].encode(), b"\xff\xfe", b"[]", b" " * (LARGEST + 1), b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(KVPatchError, match="no valid profile"):
            load_profile(path)
    with pytest.raises(KVPatchError, match="There is no file .*kvpatch tune"):
        load_profile(tmp_path / "none")
    for given in (3, ""):
        with pytest.raises(KVPatchError, match="is no path: give the file that `kvpatch tune` wrote"):
            load_profile(given)


def test_refused_beside_other_arguments_and_on_another_model(model, profile, path):
    given = ({"policy": "h2o"}, {"k": 0.5}, {"k": 8}, {"schedule": "both"}, {"window": 4})
    for more in given:
        with pytest.raises(KVPatchError, match=f"{next(iter(more))}=.* is given beside profile=, which decides policy, k"):
            kvpatch.patched(model, profile=path, **more)
    with pytest.raises(KVPatchError, match="profile=3 is no profile: give the file that `kvpatch tune` wrote"):
        kvpatch.patched(model, profile=3)
    with pytest.raises(KVPatchError, match="profile= is of another model: .*Run `kvpatch tune` on this model"):
        kvpatch.patched(make("llama_gqa", dtype=torch.float64, seed=1), profile=path)
    assert kept(model, profile=path), "and the model is as it was"
