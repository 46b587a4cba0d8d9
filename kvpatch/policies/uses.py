"""Uses, and the policy to take for each: the one table for the README, the guides, the command line and the errors.

Imports no torch, so that `kvpatch policies` answers at once. tests/test_uses.py compares every place that names a policy for a
use with this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import KVPatchError, suggest


@dataclass(frozen=True)
class Use:
    """Policy and budget for one use.

    Attributes:
        key: short name of the use.
        name: the use in a few words, without a capital or a full stop.
        policy: name of the policy.
        k: its budget, a share of the prompt or tokens, as `patched` takes it.
        why: one or two sentences in Markdown.
        options: of the policy.
        also: names of policies that do as well.

    Example:
        >>> find_use("later").write_call()
        'patched(model, "kvzip", k=0.3, floor=0.2)'
    """

    key: str
    name: str
    policy: str
    k: float | int
    why: str
    options: Mapping[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()

    def write_call(self) -> str:
        """Write a call of `patched` that serves this use."""
        values = "".join(f", {name}={value!r}" for name, value in {"k": self.k, **self.options}.items())
        return f'patched(model, "{self.policy}"{values})'

    def write_options(self) -> str:
        """Write the options of the command line that serve this use."""
        options = "".join(f" -o {name}={value!r}" for name, value in self.options.items())
        return f"--policy {self.policy} -k {self.k}{options}"


CHANCE = "random"
SPARED: Mapping[str, Any] = {"sinks": 4, "recent": 0.25}
"""Options of the policy CHANCE where others must beat it: it spares the first and the newest tokens, as good policies do."""

USES = (
    Use(
        "question",
        "the question is in the prompt",
        "snapkv",
        0.3,
        "It keeps what the prompt's last tokens look at, which suits a fact that they ask for. Of code and of a system "
        "prompt's rules it keeps less than the null; of one entry in a list of forty it keeps as much.",
    ),
    Use(
        "later",
        "read now, ask later",
        "kvzip",
        0.3,
        "It reads the text twice, holds all of it until then, and keeps what the model needs to repeat it, whatever the "
        "question will be. No server accepts it. Of the policies that read once, `cur` keeps the most of facts, half of the "
        "gain, but less than the null of how the text goes on.",
        {"floor": 0.2},
    ),
    Use(
        "code",
        "code, asked for in the prompt or later",
        "keyformer",
        0.5,
        "Of the policies that read once it keeps the most of a function: half of the gain at a fifth of the prompt. `kvzip` "
        "keeps all of it, but reads the prompt twice. For long answers take `roco`.",
        {"noise": "none"},
    ),
    Use(
        "chat",
        "a chat",
        "streaming_llm",
        4096,
        "It keeps the newest turns whole, and a fifth of the gain from facts in older turns. Protect the system prompt, and "
        "keep as many tokens as memory allows. `h2o` keeps more of code; `kvzip` keeps nearly all, but reads each turn twice.",
    ),
    Use(
        "server",
        "a server",
        "h2o",
        4096,
        "A server gets requests of all kinds. Of code and of rules it keeps more than the null, of facts no more, and of a "
        "chat's older turns less. If every request ends with a question about a fact, take `snapkv`; if all are chats, "
        "`streaming_llm`; if answers are long, `roco`.",
    ),
    Use(
        "long",
        "a long answer",
        "roco",
        4096,
        "The budget also holds while the model writes. `roco` scores by mean attention, `tova` by the newest token's; `h2o` "
        "is farther from the full cache. `snapkv` is nearer, but evicts no token of the answer.",
        also=("tova",),
    ),
    Use(
        "stream",
        "an endless stream",
        "streaming_llm",
        4096,
        "It keeps the first four tokens and the newest ones, and computes no scores. `roco`, which does, keeps more.",
    ),
)
"""The table, in the order in which it is shown."""


def find_use(key: str) -> Use:
    """Return a use (a policy and budget that suit it) by its key; KVPatchError for others.

    The command line calls it at import, for its default policies.
    """
    for use in USES:
        if use.key == key:
            return use
    known = [use.key for use in USES]
    raise KVPatchError(f"Unknown use {key!r}.{suggest(key, known)} Known: {', '.join(known)}.")


def list_uses(policy: str) -> tuple[Use, ...]:
    """List the uses for which a policy is the one to take, or does as well."""
    return tuple(use for use in USES if policy in (use.policy, *use.also))
