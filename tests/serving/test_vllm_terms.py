"""The settings of a budget in vLLM's configuration: read and refused without vLLM."""

import json

import pytest

import kvpatch
from kvpatch.serving.vllm.terms import OWN, find_own, make_terms, read_terms
from kvpatch.serving.vllm.versions import asks_for_budget


def test_settings():
    terms = make_terms({"policy": "H2O", "k": 1024, "recent": 0.3, "seed": 7, "positions": "original"})
    assert (terms.policy.name, terms.k, terms.seed, terms.policy.options()["recent"]) == ("h2o", 1024, 7, 0.3)
    assert make_terms({"policy": "snapkv", "k": 64, "window": 8}).policy.schedule == "prompt"
    assert make_terms({"policy": "h2o", "k": 64, "schedule": "prompt"}).policy.schedule == "prompt"


def test_a_file_of_settings(tmp_path, monkeypatch):
    """A file, the name of one in the variable, and what a file holds are the settings that they stand for."""
    monkeypatch.chdir(tmp_path)
    kvpatch.Settings("h2o", 64, {"recent": 4, "schedule": "prompt", "seed": 3}).save("settings.json")
    wanted = kvpatch.get_policy("h2o").with_options("prompt", recent=4)
    held = json.loads((tmp_path / "settings.json").read_text())
    inside = {"kvpatch": "settings.json"}, {"kvpatch": held}
    for terms in (
        *(read_terms(one, None) for one in inside),
        read_terms({}, "settings.json"),
        read_terms({}, json.dumps(held)),
    ):
        assert terms is not None and (terms.policy, terms.k, terms.seed) == (wanted, 64, 3)
    assert asks_for_budget({"kvpatch": "settings.json"})
    with pytest.raises(kvpatch.KVPatchError, match=r"There is no file none\.json: give one that Settings\.save wrote"):
        read_terms({"kvpatch": "none.json"}, None)
    for changed, words in (
        ({"k": "much"}, "is no content of a file of kvpatch.Settings: k='much' is not a size"),
        ({"format": "kvpatch settings 0"}, "it is not of this version of kvpatch"),
        (
            {"options": {"bits": 8}},
            "bits=8 is not served in vLLM: keys and values have the model's own precision. Leave it out.",
        ),
    ):
        with pytest.raises(kvpatch.KVPatchError) as refused:
            make_terms(held | changed)
        assert words in str(refused.value)


def test_where_they_are_given():
    given = {"policy": "h2o", "k": 16}
    assert read_terms({}, None) is None and read_terms({"other": 1}, "") is None and read_terms(None, None) is None
    for found in (read_terms({"kvpatch": given}, None), read_terms({}, json.dumps(given))):
        assert found is not None and found.k == 16
    with pytest.raises(kvpatch.KVPatchError, match=r"Both additional_config.*leave one out"):
        read_terms({"kvpatch": given}, json.dumps(given))
    with pytest.raises(kvpatch.KVPatchError, match=r"KVPATCH_VLLM='h2o' is not JSON.*write KVPATCH_VLLM="):
        read_terms({}, "h2o")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("h2o", "must be an object of settings, or a file of them that ends in .json: --additional-config"),
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
        ({"policy": "h2o", "k": 64, "max_k": 32}, "max_k=32 is below k=64, which requests have that ask for nothing"),
        ({"policy": "h2o", "k": 64, "max_k": "1GiB"}, "max_k='1GiB' must be a number of tokens, at least 1"),
        ({"policy": "pyramidkv", "k": 64, "max_k": 64}, "gives layers different numbers of tokens, for which pages are sized"),
        ({"policy": "h2o", "k": 3, "block": 64}, "max_num_batched_tokens is their size"),
        ({"policy": "h2o", "k": 3, "bits": 4}, "bits=4 is not served"),
        ({"policy": "h2o", "k": 3, "protect": [1]}, "sees no token ids"),
        ({"policy": "h2o", "k": 3, "quota": [[0, 9]]}, "does not see where spans of a prompt lie"),
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
        make_terms(given)
    assert words in str(refused.value)


def test_a_misspelt_key():
    """Settings that nothing would read are refused; another plugin's key is not taken for one."""
    budget = {"policy": "h2o", "k": 16}
    for key in ("kvpach", "kv_patch", "KVPatch", "kv-patch"):
        with pytest.raises(kvpatch.KVPatchError, match=rf"under '{key}', which nothing reads. Did you mean 'kvpatch'\?"):
            read_terms({key: budget}, None)
    with pytest.raises(kvpatch.KVPatchError, match="under 'kvpach', which nothing reads"):
        read_terms({"kvpach": "tuned/settings.json"}, None)
    for other in (
        {"kv_path": "/store"},
        {"kvpath": "cards.json"},
        {"kv_cache": {"policy": "lru"}},
        {"press": budget},
        {"kvpatc": None},
    ):
        assert read_terms(other, None) is None


def test_the_line_of_a_start():
    """It says the policy, k, the pages and the bytes of a request, how many fit, and where prompts are cut."""
    said = make_terms({"policy": "h2o", "k": 512}).describe_start("33 pages of 16 slots in 30 layers", 23_639_040, 40, 2048)
    assert said == (
        "[kvpatch] policy h2o, k=512: a request takes 33 pages of 16 slots in 30 layers, 23.6 MB of keys and values; 40 such "
        "requests fit, and prompts are read in pieces of at most 2048 tokens."
    )
    for given, words in (
        ({"policy": "h2o", "k": 0.5}, "k=0.5: a request takes at most 9 pages, 1 MB"),
        ({"policy": "snapkv", "k": 64}, "k=64: a request takes at most 9 pages, 1 MB"),
        ({"policy": "h2o", "k": 64, "max_k": 256}, "k=64 (of its own up to 256): a request takes at most 9 pages, 1 MB"),
    ):
        said = make_terms(given).describe_start("9 pages", 1_000_000, 40, None)
        assert words in said and said.endswith("fit, and prompts are read whole.")


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ({"policy": "h2o", "k": 64}, 64),
        ({"policy": "h2o", "k": 64, "max_k": 256}, 256),
        ({"policy": "h2o", "k": 0.5}, 0),
        ({"policy": "h2o", "k": 0.5, "max_k": 256}, 256),
        ({"policy": "h2o", "k": "64MiB"}, 0),
        ({"policy": "pyramidkv", "k": 64}, 0),
    ],
)
def test_what_a_request_may_ask_for(given, most):
    terms = make_terms(given)
    assert terms.most == most
    for asked, own in ((1, 1), (most, most), (most + 1, 0), (0, 0), (True, 0), ("8", 0), (2.0, 0)):
        assert find_own({OWN: asked}, most) == (own if most else 0)
        if own and most:
            terms.check_request({OWN: asked, "other": 1})
            continue
        with pytest.raises(
            kvpatch.KVPatchError, match=rf"kvpatch_k={asked!r} .*(from 1 to {most},|is not served: .*Leave it out)"
        ):
            terms.check_request({OWN: asked})
    for asked in (None, {}, {"session_id": "a"}):
        terms.check_request(asked)
    for name in ("kvpatch", "kvpatch_policy", "KVPatch_K", "kvpach_k"):
        with pytest.raises(kvpatch.KVPatchError, match=f"vllm_xargs has '{name}', which nothing reads: of a request's budget"):
            terms.check_request({name: 8})
