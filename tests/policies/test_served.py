"""The table of features that do not go together: all of it can be met, and a row or a need is all that a refusal takes."""

from dataclasses import dataclass, replace

import pytest

import kvpatch
from kvpatch.policies import POLICIES, get_policy, served
from kvpatch.policies.needs import Need
from kvpatch.policies.scores import Score
from kvpatch.policies.served import FEATURES, NEED, REFUSED, FeatureSet, refuse, refuse_pairs, why_not
from tests.helpers.tiny import make

H2O = get_policy("h2o")
EVERY = replace(H2O, every=4)
FOUND = {
    "adaptive budgets": {"policy": get_policy("adakv")},
    "critical": {"policy": get_policy("critical(h2o)")},
    "divided budget": {"policy": get_policy("pyramidkv")},
    "every": {"policy": EVERY},
    "merging": {"policy": get_policy("merged(h2o)")},
    "no eviction": {"policy": get_policy("full")},
    "one budget for all layers": {"policy": get_policy("global_topk(h2o)")},
    "output projection": {"policy": get_policy("critical(h2o)")},
    "protect=": {"policy": H2O.with_options(protect=[1])},
    "protect= as a mask": {"policy": H2O.with_options(protect=[True])},
    "protect= by unknown token ids": {"policy": H2O.with_options(protect=[1]), "unknown": True},
    "protect='system'": {"policy": H2O.with_options(protect="system")},
    "pyramid": {"policy": get_policy("pyramidkv")},
    "quota=": {"policy": H2O.with_options(quota=[(0, 4)])},
    "pyramid of a share": {"policy": get_policy("pyramidkv"), "of_the_prompt": True},
    "schedule='decode'": {"policy": H2O.with_options("decode")},
    "schedule='prompt'": {"policy": get_policy("snapkv")},
    "eviction by steps": {"policy": H2O},
    "eviction layer by layer": {"policy": get_policy("r_kv")},
    "scores of the prompt's rows": {"policy": H2O},
    "scores measured anew by steps": {"policy": get_policy("streaming_llm")},
    "selection": {"policy": get_policy("critical(h2o)")},
    "scores that are no weights": {"policy": get_policy("key_diff")},
    "second reading": {"policy": get_policy("kvzip")},
    "second reading of unknown tokens": {"policy": get_policy("kvzip"), "unknown": True},
    "turns": {"policy": get_policy("snapkv").with_options(turns="first")},
    "block": {"block": 8},
    "bits": {"bits": 4},
    "renumbered": {"renumbered": True},
    "record": {"record": True},
    "strict": {"strict": True},
    "lossless": {"lossless": True},
    "budgets by head": {"varied": "Mass(0.9)"},
    "budget below every": {"policy": EVERY, "least": 3},
    "k as a table": {"table": True},
    "k as a list": {"listed": True, "k": [1, 2]},
    "k=1.0": {"k": 1.0},
    "budget that evicts nothing": {"acts": False},
    "layer that keeps everything": {"whole": 0},
    "ALiBi": {"alibi": "mpt"},
    "attention in chunks": {"chunks": True},
    "automatic row": {"row": "InterfaceAdapter(...)", "adapter": "mine"},
    "keys of other layers": {"borrows": True},
    "latent attention": {"latent": True},
    "layers without a budget": {"mixed": True},
    "obstacle": {"obstacle": "it turns them", "adapter": "mine"},
    "positions by columns": {"positions_fixed": "it takes no position_ids"},
    "recurrence": {"recurrent": True, "states": "1, 3"},
    "sliding windows": {"windows": True},
    "states": {"states": "1, 3"},
    "tensor parallel": {"sharded": True},
}
CELLS = [(path, feature) for path, cells in REFUSED.items() for feature in cells if feature != NEED]


@pytest.mark.parametrize(("path", "feature"), CELLS, ids=map(" + ".join, CELLS))
def test_every_cell_is_met_by_its_feature_and_by_nothing_else(path, feature):
    plain = get_policy("streaming_llm")
    said = {"k": 3, "block": 8 if path == "block" else None, "past": "DynamicCache", "drafts": 2, "crop": 2}
    asked = FeatureSet(**{"policy": plain, **said, **FOUND[feature]})
    words = why_not(path, asked)
    assert words is not None and "None" not in words and "{" not in words
    with pytest.raises(kvpatch.KVPatchError) as refused:
        refuse(path, asked)
    assert str(refused.value) == words
    usual = {"policy": plain.with_options("prompt") if feature.endswith("by steps") else plain}
    if "policy" in FOUND[feature]:  # what else the feature takes is refused with its policies alone
        usual = {**FOUND[feature], **usual}
    assert "scores that are no weights" in REFUSED[path] or why_not(path, FeatureSet(**usual)) is None


def test_a_need_refuses_a_pass_or_an_engine_only_where_something_is_evicted():
    kvzip = get_policy("kvzip")
    assert "reads each a second time" in why_not("continuous batching", FeatureSet(kvzip))
    assert why_not("continuous batching", FeatureSet(kvzip, acts=False)) is None
    with pytest.raises(kvpatch.KVPatchError, match="block=8: policy 'kvzip' evicts after a second reading"):
        refuse_pairs(FeatureSet(kvzip, acts=False, block=8))


def test_rows_name_features_and_needs_name_rows():
    assert {feature for _, feature in CELLS} <= set(FEATURES) == set(FOUND) | {"rotations undone", "shared sums"}
    for policy in (*POLICIES.values(), POLICIES["keyformer"].with_options(shared=True)):
        for need in policy.needs:
            assert need.refuses.keys() <= {*REFUSED, *FEATURES}
    assert set(served.QUIET) <= set(REFUSED)


def test_a_kind_of_tokens_is_neither_ids_nor_a_mask():
    policy = H2O.with_options(protect="image")
    assert why_not("continuous batching", FeatureSet(policy)) is why_not("inputs_embeds", FeatureSet(policy)) is None


@pytest.mark.parametrize("name", ["full", "h2o", "snapkv", "kvzip", "critical_snapkv"])
def test_what_no_gate_asks_for_is_not_refused(name):
    refuse_pairs(FeatureSet(get_policy(name)))


def test_a_refused_combination_is_one_row(monkeypatch):
    """No other file: the gates ask."""
    model = make("llama_gqa")
    with kvpatch.patched(model, "merged(h2o)", strict=True):
        pass
    monkeypatch.setitem(REFUSED, "strict", {"merging": "strict=True does not go with policy {name}."})
    with pytest.raises(kvpatch.KVPatchError, match=r"strict=True does not go with policy 'merged_h2o'\."):
        kvpatch.patched(model, "merged(h2o)", strict=True)
    with kvpatch.patched(model, "h2o", strict=True):
        pass


@dataclass(frozen=True)
class Shy(Need):
    """A need of one's own, which leaves the table as it is."""

    feature: str = "bits"

    @property
    def refuses(self):
        return {self.feature: "it reads keys as they were"}


@dataclass(frozen=True)
class Watched(Score):
    """Even positions."""

    feature: str = "bits"

    @property
    def needs(self):
        return (Shy(self.feature),)

    def value(self, context):
        return (context.positions_BHT % 2 == 0).float()


@pytest.mark.parametrize(
    ("feature", "options", "words"),
    [
        ("bits", {"bits": 8}, "Policy 'watched' does not go with bits: it reads keys as they were"),
        ("strict", {"strict": True}, "Policy 'watched' does not go with strict: it reads keys as they were"),
        ("record", {"record": True}, "Policy 'watched' does not go with record: it reads keys as they were"),
        ("block", {"block": 8, "k": 1.0}, "block=8: it reads keys as they were"),
        ("renumbered", {"positions": "renumbered"}, "policy 'watched', it reads keys as they were: use positions='original'"),
    ],
)
def test_a_need_brings_its_refusals_with_it(feature, options, words):
    model, policy = make("llama_gqa"), kvpatch.Policy("watched", Watched(feature))
    with kvpatch.patched(model, policy):
        pass
    with pytest.raises(kvpatch.KVPatchError) as refused:
        kvpatch.patched(model, policy, **options)
    assert words in str(refused.value)


def test_a_need_that_refuses_an_unknown_feature_is_told():
    with pytest.raises(kvpatch.KVPatchError, match=r"Shy\.refuses names 'recrod', no feature .* Did you mean 'record'\?"):
        kvpatch.Policy("watched", Watched("recrod"))
