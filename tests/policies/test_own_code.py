"""Mistakes in a score or scope that a user wrote are answered with the method, the policy and what it should return."""

import re
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import kvpatch
from kvpatch import KVPatchError, Policy, Scope, Score
from kvpatch.policies.context import OWN_STATE
from kvpatch.policies.needs import Need, Sums, WindowAttention
from tests.helpers.tiny import make, prompt

pytestmark = pytest.mark.usefixtures("no_gradients")


@dataclass(frozen=True)
class Undeclared(Score):
    def value(self, context):
        return context.state["sum"]


@dataclass(frozen=True)
class Silent(Score):
    def value(self, context):
        context.positions_BHT.float()


@dataclass(frozen=True)
class Flat(Score):
    def value(self, context):
        return torch.arange(3.0)


@dataclass(frozen=True)
class OneHead(Score):
    def value(self, context):
        return context.positions_BHT[0, 0].float()


@dataclass(frozen=True)
class Typo(Score):
    def value(self, context):
        return context.position_BHT.float()


@dataclass(frozen=True)
class ListEntry(Score):
    def entry(self, new):
        return [new.k_BHQD.norm(dim=-1)]

    def value(self, context):
        return context.positions_BHT.float()


@dataclass(frozen=True)
class WideEntry(ListEntry):
    def entry(self, new):
        return {"mine": new.k_BHQD.norm(dim=-1).sum(1)}


@dataclass(frozen=True)
class OldEntry(ListEntry):
    def entry(self, k_BHQD, positions_BQ):
        return {}


@dataclass(frozen=True)
class Later(Score):
    """Newer tokens before older ones, by numbers that are negative from position 30 on."""

    signed: ClassVar[bool] = False

    def value(self, context):
        return context.positions_BHT.float() - 1000 * (context.newest_B11 >= 30)


@dataclass(frozen=True)
class MineNeed(Need):
    def entry(self, new):
        return {"mine": new.k_BHQD.norm(dim=-1)}


@dataclass(frozen=True)
class TakenEntry(ListEntry):
    """Norms of keys would count as those of projected values, as attention, or as what another part stores."""

    name: str
    needs = (MineNeed(), Sums("sum"), WindowAttention(4))

    def entry(self, new):
        return {self.name: new.k_BHQD.norm(dim=-1)}


@dataclass(frozen=True)
class ListNeed(Need):
    def entry(self, new):
        return [new.k_BHQD.norm(dim=-1)]


@dataclass(frozen=True)
class Needing(ListEntry):
    needs = (ListNeed(),)


@dataclass(frozen=True)
class WrongScope(Scope):
    def mask(self, context):
        return context.positions_BHT


TAKEN = (*(one.name for one in OWN_STATE), "sum", "observed", "mine")
MISTAKES = [
    (Undeclared(), r"Undeclared\.value\(context\).*KeyError: 'sum'.*\[B,H,T\] = \[1, 2, 20\].*needs = \(Sums\('sum'\),\)"),
    (Silent(), r"Silent\.value\(context\).*returned None.*float tensor \[B,H,T\] = \[1, 2, 20\]"),
    (Flat(), r"Flat\.value\(context\).*returned a tensor of shape \[3\].*\[B,H,T\] = \[1, 2, 20\]"),
    (OneHead(), r"OneHead\.value\(context\).*returned a tensor of shape \[20\].*\[1, 2, 20\]"),
    (Typo(), r"Typo\.value\(context\).*AttributeError: .*position_BHT.*context\.positions_BHT\.$"),
    (ListEntry(), r"ListEntry\.entry\(.*returned a list.*dict.*\[B,H,Q\] = \[1, 2, 20\]"),
    (WideEntry(), r"WideEntry\.entry\(.*'mine' is a tensor of shape \[1, 20\].*\[B,H,Q\] = \[1, 2, 20\]"),
    (OldEntry(), r"OldEntry\.entry\(.*TypeError: .*positional argument.*entry\(self, new\)"),
    (Needing(), r"ListNeed\.entry\(.*returned a list.*dict.*\[B,H,Q\] = \[1, 2, 20\]"),
    *((TakenEntry(one), rf"TakenEntry\.entry\(.*stores '{one}'.*another name") for one in TAKEN),
]  # fmt: skip


@pytest.mark.parametrize(("score", "words"), MISTAKES, ids=[type(score).__name__ for score, _ in MISTAKES])
def test_a_mistake_in_a_score_names_the_method_and_the_shape(score, words):
    with kvpatch.patched(make("llama_gqa"), Policy("mine", score), 0.5) as patch, pytest.raises(KVPatchError) as told:
        patch._target.decoder(prompt(1, 20))
    assert re.search(words, str(told.value)), told.value
    assert "policy 'mine'" in str(told.value)
    assert told.value.__cause__ is not None or any(word in str(told.value) for word in ("returned", " is a ", "stores"))


@pytest.mark.parametrize(("schedule", "steps"), [("prompt", 0), ("decode", 10), ("both", 10)])
def test_negative_numbers_keep_their_order_whatever_the_class_says(schedule, steps):
    model, fed = make("llama_gqa"), prompt(1, 40)
    with kvpatch.patched(model, Policy("later", Later()), 4, schedule=schedule) as patch:
        cache = patch.new_cache()
        for part in fed.split([40 - steps, *[1] * steps], 1):
            model(part, past_key_values=cache)
    held = [*range(30), *range(36, 40)] if schedule == "decode" else range(36, 40)
    assert {tuple(sorted({*head} - {-1})) for one in patch.report().positions for head in one[0].tolist()} == {(*held,)}


@dataclass(frozen=True)
class ShortScope(Scope):
    def mask(self, context):
        return context.positions_BHT[..., 1:] > 3


@dataclass(frozen=True)
class HeadlessScope(Scope):
    """Its mask [B,T] of two rows would be taken for one of two heads."""

    def mask(self, context):
        return context.positions_BHT[:, 0] > 3


SCOPES = [(WrongScope(), r"torch\.int64"), (ShortScope(), r"shape \[2, 2, 19\]"), (HeadlessScope(), r"shape \[2, 20\]")]


@pytest.mark.parametrize(("scope", "said"), SCOPES, ids=[type(scope).__name__ for scope, _ in SCOPES])
def test_a_mistake_in_a_scope_too(scope, said):
    policy = Policy("mine", kvpatch.get_policy("h2o").score, scope)
    words = rf"{type(scope).__name__}\.mask\(context\) of policy 'mine' returned a tensor of {said}.*bool tensor \[B,H,T\]"
    with kvpatch.patched(make("llama_gqa"), policy, 0.5) as patch, pytest.raises(KVPatchError, match=words):
        patch._target.decoder(prompt(2, 20))


@dataclass(frozen=True)
class Evens(Scope):
    def mask(self, context):
        return context.positions_BHT % 2 == 0


@pytest.mark.parametrize(
    "wrap", [kvpatch.critical, lambda base: base, kvpatch.global_topk], ids=["critical", "plain", "global"]
)
def test_a_scope_that_protects_more_than_the_budget_keeps_what_fits(wrap):
    policy = wrap(Policy("evens", kvpatch.get_policy("h2o").score, Evens()))
    with kvpatch.patched(make("llama_gqa"), policy, 10) as patch:
        cache = patch.new_cache()
        patch._target.decoder(prompt(1, 40), past_key_values=cache)
        held = [cache.positions(layer)[0] for layer in range(len(cache.layers))]
        assert sum(int((one >= 0).sum()) for one in held) == 10 * sum(len(one) for one in held)
        assert all(bool(((one % 2 == 0) | (one < 0)).all()) for one in held) or wrap is kvpatch.global_topk


# ---- what needs read ----


@dataclass(frozen=True)
class Peak(Need):
    """The most attention that a token got of a step's token; `wrong` is a mistake of those that users make."""

    wrong: str = ""
    name: ClassVar[str] = "peak"
    rows: ClassVar[str] = "window"

    def entry(self, new):
        return {"peak": new.k_BHQD.new_zeros(new.k_BHQD.shape[:3])}

    def read(self, prompt):
        if self.wrong == "read":
            prompt.layer.statistic("peak").copy_(prompt.positions)
        q, rows = prompt.q_BHGQD[:, :, :, -4:], prompt.rows_BQ[:, -4:]
        q, rows = {"axes": (q[:, :, :, 0], rows), "rows": (q, rows[:, 0])}.get(self.wrong, (q, rows))
        prompt.layer.statistic("peek" if self.wrong == "name" else "peak").copy_(prompt.attention(q, rows))

    def step(self, step):
        if self.wrong == "query":
            step.q_BHGD.sum()
        peak = step.layer.statistic("peak")
        peak.copy_(torch.maximum(peak, step.p_BHGT.amax(3 if self.wrong == "shape" else 2)))


@dataclass(frozen=True)
class Unasked(Peak):
    rows: ClassVar[str] = "none"


@dataclass(frozen=True)
class Alike(Peak):
    alone: ClassVar[bool] = False


@dataclass(frozen=True)
class Misspelt(Peak):
    rows: ClassVar[str] = "windows"


@dataclass(frozen=True)
class Peaks(Score):
    need: Need

    @property
    def needs(self):
        return (self.need,)

    def value(self, context):
        return context.state["peak"].float()


READS = [
    (Peak("read"), r"Peak\.read\(prompt\) of policy 'mine' raised AttributeError: .*'positions'[^:]*$"),
    (Peak("name"), r"no numbers 'peek', but .*peak.*entry\(new\)"),
    (Peak("shape"), r"Peak\.step\(step\) of policy 'mine' raised RuntimeError"),
    (Peak("axes"), r"takes queries \[B,H,G,W,D\] .*got \[1, 2, 2, 8\] and \[1, 4\]"),
    (Peak("rows"), r"a position for each row, \[B,W\].*got \[1, 2, 2, 4, 8\] and \[1\]"),
    (Alike("query"), r"Alike\.step\(step\).*NoneType.*no queries, keys, values or notes: Alike\.alone is False"),
    (Unasked(), r"Unasked\.step\(step\).*NoneType.*Unasked\.rows is 'none', and \"window\" asks for it"),
    (Misspelt(), r"Misspelt\.rows is 'windows'.*'none', 'window' or 'all'"),
]


@pytest.mark.parametrize(("need", "words"), READS, ids=[need.wrong or type(need).__name__ for need, _ in READS])
def test_a_mistake_in_a_need_names_the_method(need, words):
    model = make("llama_gqa")
    with pytest.raises(KVPatchError, match=words), kvpatch.patched(model, Policy("mine", Peaks(need)), 0.5):
        model.generate(prompt(1, 20), max_new_tokens=4, do_sample=False)


def test_a_need_of_attention_is_not_asked_where_steps_evict_nothing():
    model, found = make("llama_gqa"), []
    for schedule in ("prompt", "both"):
        with kvpatch.patched(model, Policy("mine", Peaks(Peak())), 0.5, schedule=schedule) as patch:
            cache = patch.new_cache()
            model.generate(prompt(1, 20), past_key_values=cache, max_new_tokens=4, do_sample=False)
        found.append(cache.layers[0].state["peak"][0, 0, : cache.layers[0].columns_used])
    assert [len(one) for one in found] == [13, 11]
    assert not found[0][-3:].any() and found[1][-3:].any()  # tokens that steps wrote


def test_the_users_own_errors_and_a_full_memory_come_out_as_they_are():
    for error in (KVPatchError("mine"), torch.OutOfMemoryError("full"), KeyboardInterrupt()):

        @dataclass(frozen=True)
        class Raises(Score):
            def value(self, context, error=error):
                raise error

        with kvpatch.patched(make("llama_gqa"), Policy("mine", Raises()), 0.5) as patch, pytest.raises(type(error)) as told:
            patch._target.decoder(prompt(1, 20))
        assert told.value is error


# ---- registries ----


def test_a_policy_is_registered_again_and_forgotten():
    mine = kvpatch.get_policy("h2o").with_options(recent=0.1)
    kvpatch.register_policy("mine", mine)
    try:
        with pytest.raises(KVPatchError, match=r"already registered.*exist_ok=True"):
            kvpatch.register_policy("mine", mine)
        for spelling in ("Mine", "mi_ne"):  # get_policy("MINE") would find the last one
            with pytest.raises(KVPatchError, match="named 'mine' is already registered"):
                kvpatch.register_policy(spelling, mine, exist_ok=True)
        kvpatch.register_policy("mine", mine.with_options(recent=0.2), exist_ok=True)
        assert kvpatch.get_policy("mine").options()["recent"] == 0.2
    finally:
        kvpatch.unregister_policy("mine")
    assert "mine" not in kvpatch.list_policies()
    with pytest.raises(KVPatchError, match=r"Unknown policy 'mine'"):
        kvpatch.unregister_policy("mine")


def test_an_architecture_is_registered_again_and_forgotten():
    rows = [kvpatch.InterfaceAdapter("mine", f"package.module.{name}Attention") for name in ("One", "Other")]
    kvpatch.register_arch(rows[0])
    try:
        with pytest.raises(KVPatchError, match=r"served by the adapter 'mine' already.*exist_ok=True"):
            kvpatch.register_arch(rows[0])
        kvpatch.register_arch(rows[0], exist_ok=True)
        kvpatch.register_arch(rows[1], exist_ok=True)
        assert kvpatch.list_architectures().count("mine") == 1
        from kvpatch.arch.adapter import REGISTRY

        assert [name for name, one in REGISTRY.items() if one.name == "mine"] == ["package.module.OtherAttention"]
    finally:
        kvpatch.unregister_arch("mine")
    assert "mine" not in kvpatch.list_architectures()
    with pytest.raises(KVPatchError, match=r"Unknown architecture 'lama'\. Did you mean 'llama'\?"):
        kvpatch.unregister_arch("lama")
