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
from ...policies.budgets import Rule, is_list, parse_k
from ...policies.served import Combination, refuse
from ...storage.settings import Settings
from .versions import KEY, VARIABLE, find_misspelt_key

NAMES = ("policy", "k", "schedule", "seed", "positions")

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
class Terms:
    """A request's budget. k: of each request: tokens that a KV head keeps, a share of its prompt, or a size of all layers."""

    policy: Policy
    k: int | float | str
    seed: int = 0

    @property
    def of_the_prompt(self) -> bool:
        """True if the budget is a share of each request's prompt."""
        return isinstance(self.k, float)

    def describe_request(self, slots: int, layers: int, size: int) -> str:
        """Return the line that an operator reads at the start. slots: of a page. size: bytes of the largest request."""
        most = "at most " if self.of_the_prompt or self.policy.schedule == "prompt" else ""
        return (
            f"[kvpatch] policy {self.policy.name}, k={self.k}: a request takes pages of {slots} slots in {layers} layers, "
            f"{most}{size / 1e6:.3g} MB of keys and values."
        )


def configured(additional: object, variable: str | None) -> Terms | None:
    """Return the settings, or None if there are none.

    Args:
        additional: vLLM's additional_config.
        variable: the environment variable KVPATCH_VLLM: JSON, or the name of a file of Settings that ends in ".json".

    Raises:
        KVPatchError: they cannot work, or both are given.
    """
    if (misspelt := find_misspelt_key(additional)) is not None:
        raise KVPatchError(f"additional_config has settings under {misspelt!r}, which nothing reads. Did you mean {KEY!r}?")
    own = additional.get(KEY) if isinstance(additional, Mapping) else None
    if own is None and not variable:
        return None
    if own is not None and variable:
        raise KVPatchError(f"Both additional_config['kvpatch'] and the variable {VARIABLE} are given: leave one out.")
    if own is not None:
        return terms_of(own)
    if str(variable).endswith(".json"):
        return terms_of(variable)
    try:
        return terms_of(json.loads(variable or ""))
    except json.JSONDecodeError as error:
        raise KVPatchError(
            f'{VARIABLE}={variable!r} is not JSON ({error}): write {VARIABLE}=\'{{"policy": "h2o", "k": 1024}}\', or name a '
            "file of kvpatch.Settings that ends in .json."
        ) from None


def terms_of(given: object) -> Terms:
    """Check the settings of a budget.

    Args:
        given: the settings by name, the name of a file of kvpatch.Settings, or the object that such a file holds.

    Raises:
        KVPatchError: an unknown name, a bad value, or what vLLM's constant number of slots cannot serve.
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
    policy, k, schedule, seed, positions = (settings.pop(name, None) for name in NAMES)
    for name, why in _INSTEAD.items():
        if name in settings:
            raise KVPatchError(f"{name}={settings[name]!r} is not served in vLLM: {why}. Leave it out.")
    chosen = get_policy(policy)
    for name in [name for name in settings if name not in chosen.options()]:
        near = suggest(name, (*chosen.options(), *NAMES))
        if any(repr(one) in near for one in NAMES):
            raise KVPatchError(f"kvpatch has no setting {name!r}.{near}")
    chosen = chosen.with_options(schedule, **settings)
    if positions not in (None, "original", "renumbered"):
        raise KVPatchError(f"positions={positions!r} is unknown; use 'original'.")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise KVPatchError(f"seed={seed!r} must be an int.")
    listed, varied = is_list(k), str(k) if isinstance(k, Rule) else None
    one: Any = k if listed or varied else parse_k(k)
    terms = Terms(chosen, one, seed or 0)
    facts = {"listed": listed, "varied": varied, "of_the_prompt": terms.of_the_prompt, "renumbered": positions == "renumbered"}
    refuse("vllm", Combination(chosen, k=one, **facts))
    return terms


def _read_contents(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in an object that a file of kvpatch.Settings holds."""
    try:
        return Settings.parse(json.dumps(given)).add_arguments({})
    except (InvalidError, TypeError, ValueError) as error:
        raise KVPatchError(
            f"kvpatch={dict(given)!r:.80} is no content of a file of kvpatch.Settings: {error}. Give the file itself, or "
            f"{_EXAMPLE}."
        ) from error
