"""The settings of a cache: made once when a model is patched, and shared by all code that needs them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ..backends.entries import FULL
from ..errors import KVPatchError
from ..policies import Policy, get_policy
from ..policies.budgets import Budget, HeadSizes, Rule, Size, as_python
from ..policies.measures import Calibration
from ..policies.needs.second_reading import Rereading
from ..policies.parallel import WHOLE, Parallel
from ..policies.served import FeatureSet, why_not
from ..policies.slopes import Sloped
from .notices import Notices
from .recurrent import Stack

SLIDING = get_policy("window")


@dataclass(frozen=True, eq=False)
class CacheSettings:
    """All settings that decide which tokens a cache keeps.

    policy, budget: of the layers that the policy acts on. bits: of each number held, in all layers; 16 stands for the model's
    own precision (backends/entries.py). seed: of the policy's random numbers. block: tokens of a prompt read between two
    evictions, or None. renumbered: positions are ranks among the tokens held. backend: as in `patched`. bounds: for each layer
    with a sliding window among layers without one, that window (tokens), which it holds under any policy; None for other
    layers. latent: for each layer, whether a value is a part of its key. parallel: KV heads of this process, if several
    processes share a model. strict: names of the layers, if their numbers are checked (attention/anomaly.py). counts_columns:
    in the unpatched model, attention's distances are between columns of the batch, padding included (sliding windows, ALiBi by
    default). records_lifetimes: caches record when each token is evicted. layer_numbers: the layers' numbers in the decoder, if
    some of its layers are not on the budget (a hybrid's, or those that use others' keys); None if all are. notices: what the
    patch has warned of. budgets: if the budget is a size in bytes, what it is in tokens by the keys' dtype; `budget` is that
    for the model's own dtype. untraced: why no decode step can be traced by torch.compile, or None.
    """

    policy: Policy
    budget: Budget
    bits: int = FULL
    seed: int = 0
    block: int | None = None
    renumbered: bool = False
    backend: str = "auto"
    bounds: tuple[int | None, ...] = ()
    latent: tuple[bool, ...] = ()
    parallel: Parallel = WHOLE
    strict: tuple[str, ...] = ()
    counts_columns: bool = False
    records_lifetimes: bool = False
    layer_numbers: Stack | None = None
    notices: Notices = field(default_factory=Notices)
    budgets: Mapping[torch.dtype, Budget] = field(default_factory=dict)
    untraced: str | None = field(init=False)

    def __post_init__(self) -> None:
        """Fill in, as a model is patched, `bounds` (layers' windows), `latent` (values in keys), and `untraced`."""
        object.__setattr__(self, "bounds", self.bounds or (None,) * len(self.budget.per_layer))
        object.__setattr__(self, "latent", self.latent or (False,) * len(self.budget.per_layer))
        object.__setattr__(self, "untraced", why_not("trace", self.list_features()))

    def __deepcopy__(self, memo: dict[int, object]) -> CacheSettings:
        """Return the settings themselves: they are frozen, and copies of a cache share them."""
        return self

    def list_features(self, **facts: Any) -> FeatureSet:
        """Return these settings' features for the table of refusals (served.py). facts: features that only the caller knows."""
        return dataclasses.replace(self._features, **facts)

    @cached_property
    def _features(self) -> FeatureSet:
        """For `list_features`: describe what these settings ask for, for the table of features that exclude each other."""
        stack, own = self.layer_numbers, [self.budget.rules[i] for i in self.budgeted]
        return FeatureSet(
            self.policy,
            acts=self.acts,
            block=self.block,
            bits=self.bits,
            renumbered=self.renumbered,
            record=self.records_lifetimes,
            strict=bool(self.strict),
            k=self.budget.shortened(),
            table=any(isinstance(rule, HeadSizes) for rule in self.budget.rules),
            varied=next((str(rule) for rule in own if rule.moves or not rule.aligned), None),
            whole=next((i for i, evicts in enumerate(self.evicts) if not evicts), None),  # a layer that keeps all
            latent=any(self.latent),
            windows=any(self.bounds),
            states="" if stack is None else ", ".join(str(number) for number, _ in stack.states),
            recurrent=stack is not None and not stack.croppable,
            borrows=stack is not None and bool(stack.readers),  # layers use others' keys
            mixed=stack is not None,
            sharded=self.parallel.size > 1,
        )

    def first_layers(self, count: int | None) -> CacheSettings:
        """Return the settings of a decoder that drafts with its first `count` layers (early exit). count: None for all."""
        # own: how many of the first `count` layers are on the budget
        if count is None or (own := self.within(count)) == self.n_layers:
            return self
        budget, budgets = self.budget.first_layers(own), {dtype: one.first_layers(own) for dtype, one in self.budgets.items()}
        stack = None if self.layer_numbers is None else self.layer_numbers.first(count)
        bounds, latent = self.bounds[:own], self.latent[:own]
        return dataclasses.replace(self, budget=budget, budgets=budgets, bounds=bounds, latent=latent, layer_numbers=stack)

    def in_dtype(self, dtype: torch.dtype) -> CacheSettings:
        """Return the settings of a cache whose first keys have this dtype, for `count_in`, as a text begins or is loaded.

        They differ where the budget is a size in bytes, which holds more tokens of a narrower dtype.

        Raises:
            KVPatchError: the size holds no token in this dtype.
        """
        budget = self.budgets.get(dtype)
        if budget is self.budget or not self.budgets:
            return self
        if budget is None:
            name = str(dtype).removeprefix("torch.")
            raise KVPatchError(
                f"k={self.budget.sizes[0]!r} was counted in the model's dtype, but the keys of this pass have {name}, in which "
                "it holds no token. Give more bytes, or convert the model back."
            )
        if dtype not in self._in_dtypes:  # caches of one dtype share an object
            self._in_dtypes[dtype] = dataclasses.replace(self, budget=budget)
        return self._in_dtypes[dtype]

    @cached_property
    def _in_dtypes(self) -> dict[torch.dtype, CacheSettings]:
        """The settings that `in_dtype` has made so far, by dtype; empty at first."""
        return {}

    def within(self, count: int) -> int:
        """Return how many of a decoder's first `count` layers are on the budget."""
        return min(count, self.n_layers) if self.layer_numbers is None else len(self.layer_numbers.first(count).attention)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """Numbers, in the decoder, of the layers that a cache has keys and values of."""
        return tuple(range(self.n_layers)) if self.layer_numbers is None else self.layer_numbers.attention

    @cached_property
    def read(self) -> frozenset[int]:
        """Indices of the layers whose keys and values later layers use, too."""
        pairs = () if self.layer_numbers is None else self.layer_numbers.readers
        return frozenset(self.numbers.index(source) for _, source in pairs)

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.budget.per_layer)

    @cached_property
    def policies(self) -> tuple[Policy, ...]:
        """The policy of each layer."""
        return tuple(self.policy if bound is None else SLIDING for bound in self.bounds)

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """The budget of each layer; of a layer with a sliding window of its own, that window."""
        return tuple(self._slope_rule(i) if bound is None else Size(bound) for i, bound in enumerate(self.bounds))

    def _slope_rule(self, layer: int) -> Rule:
        """Return a layer's budget rule; if the policy divides a budget over layers (a pyramid), a rule for the layer's part."""
        rule, policy = self.budget.rules[layer], self.policy
        if policy.over_layers is None or not policy.evicts:
            return rule
        last = policy.needs.protects + 1  # the fewest tokens of any layer
        # place: among the layers on the budget; bounded: no layer can hold more than the prompt
        place, bounded = self.budgeted.index(layer), policy.schedule != "decode"
        return Sloped(rule, policy.over_layers, place, len(self.budgeted), last, bounded)

    @cached_property
    def budgeted(self) -> tuple[int, ...]:
        """Indices of the layers that the budget applies to: all without a sliding window of their own."""
        return tuple(layer for layer, bound in enumerate(self.bounds) if bound is None)

    @cached_property
    def evicts(self) -> tuple[bool, ...]:
        """Per layer, True if it may ever evict a token, by the policy or its own window."""
        acts = self.policy.evicts
        return tuple(bound is not None or (acts and self.budget.rules[i].evicts) for i, bound in enumerate(self.bounds))

    @cached_property
    def together(self) -> tuple[int, ...]:
        """Indices of the layers that share one budget, so that they evict together where a prompt ends."""
        return tuple(layer for layer in self.budgeted if self.evicts[layer]) if self.policy.over_model else ()

    @cached_property
    def rereads(self) -> bool:
        """True if prompts are read a second time before anything is evicted."""
        return self.acts and self.policy.needs.find(Rereading) is not None

    @cached_property
    def acts(self) -> bool:
        """True if the policy evicts from any layer."""
        return any(self.evicts[layer] for layer in self.budgeted)

    @cached_property
    def transparent(self) -> bool:
        """True if nothing is evicted or rounded and positions are the model's own.

        Calls that the patch does not support may then run the model's own code.
        """
        return not self.acts and self.bits == FULL and self.block is None and not self.renumbered

    @property
    def by_columns(self) -> bool:
        """True if padding after a token counts in positions, as in the unpatched model."""
        return self.transparent and self.counts_columns

    def tokens(self, layer: int, n: int) -> int:
        """Return how many of a text's `n` tokens a KV head of `layer` may keep; see `Rule.tokens` where heads differ."""
        return self.rules[layer].tokens(n)

    def described(self) -> dict[str, Any]:
        """Describe as plain values, for `list_differences` and files, all settings that caches must share to go on."""
        return {
            "policy": _describe_policy(self.policy),
            "k": self.budget.described(),
            "bits": self.bits,
            "seed": self.seed,
            "block": self.block,
            "positions": "renumbered" if self.renumbered else "original",
        }

    def list_differences(self, other: CacheSettings) -> Iterator[tuple[str, Any, Any]]:
        """List each differing setting as (name, own value, other's); empty if all agree.

        `_check_same` asks before caches are joined, `check` of hooks/ownership.py before a cache goes on under another patch.
        """
        if other is self:
            return
        mine, theirs = (_flatten_names(one.described()) for one in (self, other))
        if len(mine["k"]) == len(theirs["k"]):  # else the numbers of layers differ
            mine["k"], theirs["k"] = self.budget.shortened(), other.budget.shortened()
        for name in dict.fromkeys((*mine, *theirs)):
            if mine.get(name) != theirs.get(name):
                yield name, mine.get(name), theirs.get(name)


def _describe_policy(policy: Policy) -> dict[str, Any]:
    """For `described`: describe a policy's name, schedule, parts and options as plain values, to compare or save."""
    fields = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy) if field.init}
    # its score, selection and so on: fields that are objects
    parts = {name: type(part).__name__ for name, part in fields.items() if not isinstance(part, str | None)}
    options = json.loads(json.dumps(policy.options(), default=_simplify_option))
    return {"name": policy.name, "schedule": policy.schedule, **parts, **options}


def _simplify_option(value: object) -> object:
    """Return a plain value for an option that JSON cannot hold: a Calibration's checksum, numbers of a tensor, else the repr.

    json.dumps calls it in `_describe_policy`.
    """
    if isinstance(value, Calibration):
        return value.digest
    converted = as_python(value)
    return repr(value) if converted is value else converted


def _flatten_names(described: dict[str, Any]) -> dict[str, Any]:
    """Return described settings with the policy's parts as entries of their own, by the name that an error gives them."""
    return {**{f"the policy's {name}": value for name, value in described.pop("policy").items()}, **described}
