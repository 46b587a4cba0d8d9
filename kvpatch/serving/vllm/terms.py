"""The settings of a budget in vLLM's configuration: {"kvpatch": {"policy": "h2o", "k": 1024}}. Needs no vLLM.

In place of the inner object may stand the name of a file of kvpatch.Settings, or the object that such a file holds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import InvalidError, KVPatchError, suggest
from ...policies import Policy, get_policy
from ...policies.budgets import Rule, check_count, is_list, parse_k
from ...policies.served import FeatureSet, refuse
from ...storage.settings import Settings
from .versions import KEY, VARIABLE, find_misspelt_key

NAMES = ("policy", "k", "max_k", "schedule", "seed", "positions")
OWN = "kvpatch_k"
"""The name of a request's own k among vLLM's `vllm_xargs`, or its SamplingParams.extra_args."""

_EXAMPLE = """--additional-config '{"kvpatch": {"policy": "h2o", "k": 1024}}'"""
_INSTEAD = {  # arguments of patched() that have no place here
    "block": "vLLM's own chunks take its place: max_num_batched_tokens is their size",
    "bits": "keys and values have the model's own precision",
    "backend": "vLLM chooses it",
    "strict": "it is a debugging aid of patched()",
    "auto": "the model is one of vLLM's own",
    "protect": "the attention of a layer sees no token ids",
    "quota": "the attention of a layer does not see where spans of a prompt lie",
}


@dataclass(frozen=True, eq=False)
class RequestTerms:
    """The budget of requests, and what one may ask for.

    k: of each request: tokens that a KV head keeps, a share of its prompt, or a size of all layers. max_k: the most tokens that
    a request may ask for in place of it; None: k, if that is a number of tokens.
    """

    policy: Policy
    k: int | float | str
    seed: int = 0
    max_k: int | None = None

    @property
    def most(self) -> int:
        """The most tokens that a request may ask for as its budget (kvpatch_k), when it arrives; 0 if it may ask for none."""
        if self.policy.over_layers is not None:  # it gives layers unequal budgets
            return 0
        return self.max_k or (self.k if isinstance(self.k, int) else 0)

    def check_request(self, asked: Mapping[str, Any] | None) -> None:
        """Raise KVPatchError, as a request arrives, if it asks for what this budget cannot give. asked: its extra_args.

        `Budgets.validate_params` calls it. KEY: "kvpatch"; OWN: "kvpatch_k", a request's own budget.
        """
        asked = asked or {}
        for name in asked:
            if name != OWN and (suggest(name, (OWN,)) or name.casefold().startswith(KEY)):
                raise KVPatchError(
                    f"vllm_xargs has {name!r}, which nothing reads: of a request's budget {OWN!r} alone is its own; policy and "
                    "options are the server's."
                )
        if OWN not in asked or find_own(asked, self.most):
            return
        if self.most:
            raise KVPatchError(
                f"{OWN}={asked[OWN]!r} must be a number of tokens from 1 to {self.most}, the most that this server gives."
            )
        raise KVPatchError(f"{OWN}={asked[OWN]!r} is not served: {self._say_why_none()}. Leave it out.")

    def _say_why_none(self) -> str:
        """Return why no request may ask for a k of its own here, for the error of `check_request`."""
        if self.policy.over_layers is not None:
            return f"policy {self.policy.name!r} gives layers different numbers of tokens, which a request cannot choose"
        return f"the server's k={self.k!r} is no number of tokens, and it has no max_k"

    @property
    def of_the_prompt(self) -> bool:
        """True if the budget is a share of each request's prompt."""
        return isinstance(self.k, float)

    def describe_start(self, pages: str, size: int, fit: int, piece: int | None) -> str:
        """Return the line that an operator reads in the log at the start; `BudgetLog` writes it.

        pages: a request's, in words. size: bytes of the largest request. fit: how many such there is room for. piece: tokens of
        a prompt that a pass reads at most; None: all.
        """
        most = "at most " if self.most != self.k or self.policy.schedule == "prompt" else ""
        own = f" (of its own up to {self.most})" if self.most and self.most != self.k else ""
        cut = "prompts are read whole" if piece is None else f"prompts are read in pieces of at most {piece} tokens"
        return (
            f"[kvpatch] policy {self.policy.name}, k={self.k}{own}: a request takes {most}{pages}, {size / 1e6:.3g} MB of keys "
            f"and values; {fit} such requests fit, and {cut}."
        )


def find_own(asked: Mapping[str, Any], most: int) -> int:
    """Return the k that a request asks for, a number of tokens from 1 to `most`, or 0."""
    asked_k = asked.get(OWN)
    return asked_k if isinstance(asked_k, int) and not isinstance(asked_k, bool) and 1 <= asked_k <= most else 0


def read_terms(additional: object, variable: str | None) -> RequestTerms | None:
    """Read the settings of a budget; None if neither source has any.

    `find_settings` calls it in each process of vLLM that needs them.

    Args:
        additional: vLLM's additional_config.
        variable: the environment variable KVPATCH_VLLM: JSON, or the name of a file of Settings that ends in ".json".

    Raises:
        KVPatchError: both sources have settings, or the settings cannot work in vLLM (see `make_terms`).
    """
    if (misspelt := find_misspelt_key(additional)) is not None:
        raise KVPatchError(f"additional_config has settings under {misspelt!r}, which nothing reads. Did you mean {KEY!r}?")
    given = additional.get(KEY) if isinstance(additional, Mapping) else None
    if given is None and not variable:
        return None
    if given is not None and variable:
        raise KVPatchError(f"Both additional_config['kvpatch'] and the variable {VARIABLE} are given: leave one out.")
    if given is not None:
        return make_terms(given)
    if str(variable).endswith(".json"):
        return make_terms(variable)
    try:
        return make_terms(json.loads(variable or ""))
    except json.JSONDecodeError as error:
        raise KVPatchError(
            f'{VARIABLE}={variable!r} is not JSON ({error}): write {VARIABLE}=\'{{"policy": "h2o", "k": 1024}}\', or name a '
            "file of kvpatch.Settings that ends in .json."
        ) from None


def make_terms(given: object) -> RequestTerms:
    """Return a budget's terms, read from the settings that vLLM was given, and checked. `read_terms` calls it.

    Args:
        given: the settings by name, the name of a file of kvpatch.Settings, or the object that such a file holds.

    Raises:
        KVPatchError: a name is unknown, a value is bad, or vLLM, where a request's number of slots is fixed, cannot serve it.
    """
    if isinstance(given, str) and given.endswith(".json"):
        settings = Settings.load(given).add_arguments({})
    elif not isinstance(given, Mapping):
        raise KVPatchError(
            f"kvpatch={given!r} must be an object of settings, or a file of them that ends in .json: {_EXAMPLE}."
        )
    else:
        settings = _read_contents(given) if "format" in given else dict(given)
    missing = [name for name in ("policy", "k") if name not in settings]
    for name in settings if missing else ():
        if near := suggest(name, missing):
            raise KVPatchError(f"kvpatch has no setting {name!r}.{near}")
    if missing:
        raise KVPatchError(f"kvpatch's settings lack {' and '.join(missing)}: {_EXAMPLE}.")
    # take out the arguments of kvpatch; what is left are options of the policy
    policy, k, max_k, schedule, seed, positions = (settings.pop(name, None) for name in NAMES)
    for name, why in _INSTEAD.items():
        if name in settings:
            raise KVPatchError(f"{name}={settings[name]!r} is not served in vLLM: {why}. Leave it out.")
    chosen = get_policy(policy)
    for name in [name for name in settings if name not in chosen.options()]:
        near = suggest(name, (*chosen.options(), *NAMES))
        if any(repr(one) in near for one in NAMES):
            raise KVPatchError(f"kvpatch has no setting {name!r}.{near}")
    chosen = chosen.with_options(schedule, **settings)
    _check_values(positions, seed)
    listed, varied = is_list(k), str(k) if isinstance(k, Rule) else None
    parsed: Any = k if listed or varied else parse_k(k)  # the former are refused
    terms = RequestTerms(chosen, parsed, seed or 0, max_k)
    facts = {"listed": listed, "varied": varied, "of_the_prompt": terms.of_the_prompt, "renumbered": positions == "renumbered"}
    refuse("vllm", FeatureSet(chosen, k=parsed, **facts))  # raises by kvpatch's table of what goes with what
    if max_k is not None:
        _check_max_k(terms)
    return terms


def _check_values(positions: object, seed: object) -> None:
    """Raise KVPatchError for wrong values of `positions` and `seed`, as `make_terms` reads kvpatch's settings in vLLM."""
    if positions not in (None, "original", "renumbered"):
        raise KVPatchError(f"positions={positions!r} is unknown; use 'original'.")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise KVPatchError(f"seed={seed!r} must be an int.")


def _check_max_k(terms: RequestTerms) -> None:
    """Raise KVPatchError if max_k is below k, or the policy gives layers different budgets. `make_terms` calls it.

    max_k: the largest budget that a request may ask for.
    """
    check_count("max_k", terms.max_k, "tokens")
    if isinstance(terms.k, int) and terms.k > terms.most > 0:
        raise KVPatchError(f"max_k={terms.max_k} is below k={terms.k}, which requests have that ask for nothing: give more.")
    if not terms.most:
        raise KVPatchError(
            f"max_k={terms.max_k} lets requests choose, but policy {terms.policy.name!r} gives layers different numbers "
            "of tokens, for which pages are sized at the start: leave max_k out."
        )


def _read_contents(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return kvpatch's settings from an object with the contents of a kvpatch.Settings file, for `make_terms`.

    Raises KVPatchError if it has other contents.
    """
    try:
        return Settings.parse(json.dumps(given)).add_arguments({})
    except (InvalidError, TypeError, ValueError) as error:
        raise KVPatchError(
            f"kvpatch={dict(given)!r:.80} is no content of a file of kvpatch.Settings: {error}. Give the file itself, or "
            f"{_EXAMPLE}."
        ) from error
