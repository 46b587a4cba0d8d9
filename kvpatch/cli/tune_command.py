"""The command `kvpatch tune`; what imports torch is imported inside, after what can be refused without it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import KVPatchError
from . import options as given
from .catalogue import check_policy
from .loading import Source, fit
from .options import TextFile, find_model_and_text
from .output import Steps, console, note, print_json, short_errors

if TYPE_CHECKING:
    from ..policies import Policy
    from ..storage.profile import Profile

TRIED = "streaming_llm,h2o,roco,snapkv,adakv,critical_adakv,layer_defensive,key_diff,leverage,compactor"
_LEAST = 8  # tokens of a prompt; a shorter one leaves nothing to choose from


def tune(  # noqa: PLR0913 - typer: an option is a parameter
    model: given.Model = None,
    file: given.Text = None,
    model_option: given.ModelOption = None,
    text: given.TextOption = None,
    tolerance: Annotated[
        float, typer.Option(help="KL from the full cache to allow, nats per token: 0.05 adds 5% perplexity.")
    ] = 0.05,
    out: given.Out = Path("profile.json"),
    policies: Annotated[str, typer.Option(help="Comma-separated, as for --policy of generate.")] = TRIED,
    length: Annotated[int, typer.Option(min=_LEAST, help="Tokens of a piece's prompt, about as many as yours have.")] = 512,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens fed after it, about as many as you generate.")] = 64,
    pieces: Annotated[
        int, typer.Option(min=1, help="Pieces of the text that the search reads, at most; as many others check the result.")
    ] = 4,
    dtype: given.Dtype = "auto",
    device: given.Device = "auto",
    device_map: given.DeviceMap = None,
    revision: given.Revision = None,
    trust_remote_code: given.RemoteCode = False,
    seed: given.Seed = 0,
    option: given.NoOption = None,
    json: given.Json = False,
) -> None:
    """Search on your own text for the policy, k per layer and floor of heads that hold the fewest bytes within a tolerance.

    The file goes with this model in this dtype: kvpatch.patched(model, profile=FILE) in Python.
    """
    with short_errors():
        name, text_file = find_model_and_text(model, file, model_option, text, option)
        source = Source(name, dtype, device, device_map, revision, trust_remote_code)
        source.check()
        names = [name.strip() for name in policies.split(",") if name.strip()]
        _check(tolerance, names)
        content = text_file.read_text()
        from ..policies import get_policy
        from ..storage.profile import save_profile

        chosen = {name: get_policy(name) for name in names}
        if wanting := [name for name, policy in chosen.items() if policy.score.calibrated]:
            raise KVPatchError(f"--policies {wanting[0]} needs a calibration, which a profile cannot hold: leave it out.")
        loaded, tokenizer = source.model(), source.tokenizer()
        ids = tokenizer(content, return_tensors="pt").input_ids.long()
        found = _cut_text(loaded, ids, tokenizer.bos_token_id, text_file, (length, max_new_tokens, 2 * pieces))
        profile, refused = _search_profile(loaded, found, chosen, tolerance, seed)
        save_profile(profile, out)
    for name, said in refused.items():
        note(f"{name} was left out: {said}")
    if json:
        print_json(
            {"file": str(out), "policy": profile.policy, "options": profile.options, "k": profile.k, **profile.measured}
        )
    else:
        _print_profile(profile, out, tolerance)


def _cut_text(model: Any, ids: Any, bos: int | None, text: TextFile, sizes: tuple[int, int, int]) -> list[Any]:
    """Cut token ids [1,T] of a text into pieces, each with the tokens of its prompt.

    sizes: tokens of a piece's prompt, tokens fed after it, and pieces, at most.

    Raises:
        KVPatchError: the text is too short for one piece.
    """
    from ..evaluation.tune import cut

    length, new, pieces = sizes
    first = ids[0, :1].tolist() if int(ids[0, 0]) == bos else []
    n = min(fit(model, ids, new)[0].shape[1], length, ids.shape[1] - new)
    if n < _LEAST:
        raise KVPatchError(
            f"{text} has {ids.shape[1]:,} tokens, too few for a prompt and --max-new-tokens {new}: give a text of a few "
            "thousand words, or fewer new tokens."
        )
    return cut(ids[:, len(first) :].to(model.device), n, new, pieces, first)


def _search_profile(
    model: Any, pieces: list[Any], policies: dict[str, Policy], tolerance: float, seed: int
) -> tuple[Profile, dict[str, str]]:
    """Search on every second piece and check on the others: the profile, and why policies were left out."""
    from ..evaluation.tune import Search, tune

    with _quiet(), Steps(console(stderr=True)) as steps:
        search = Search(model, pieces[::2], tolerance, steps.count_step, seed)
        steps.set_total(search.most(len(policies)))
        return tune(search, policies, pieces[1::2]), search.refused


def _print_profile(profile: Profile, out: Path, tolerance: float) -> None:
    """Print a profile's settings, its quality, and the line that uses it."""
    from ..policies import get_policy

    measured = profile.measured
    options = "".join(f", {name}={value!r}" for name, value in profile.options.items())
    shown = f"k={profile.k:g}" if isinstance(profile.k, float) else f"k={' '.join(f'{k:g}' for k in profile.k)}"
    print(f"{out}: {get_policy(profile.policy).name}{options}, {shown}")
    print(f"{measured['share']:.0%} of the full cache's bytes; KL {measured['kl']:.4f} on {measured['pieces']} pieces.")
    print(_checked(measured["unseen_kl"], tolerance))
    print(f'\n    with kvpatch.patched(model, profile="{out}"):')


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out warnings: a search tries budgets that protected tokens do not fit in."""
    log = getLogger("kvpatch")
    level = log.level
    log.setLevel("ERROR")
    try:
        yield
    finally:
        log.setLevel(level)


def _check(tolerance: float, names: list[str]) -> None:
    """Raise KVPatchError for what can be refused without torch."""
    if not 0 < tolerance < math.inf:
        raise KVPatchError(f"--tolerance {tolerance} must be a number of nats per token above 0, such as 0.05.")
    if not names:
        raise KVPatchError("--policies names none: give some of `kvpatch policies`, such as h2o,roco.")
    for name in names:
        check_policy(name)


def _checked(kl: float | None, tolerance: float) -> str:
    """Return the sentence about the pieces that the search did not read."""
    if kl is None:
        return "The text is one piece: nothing was left to check the result on. Give a longer one."
    said = f"On pieces that the search did not read: KL {kl:.4f}"
    return f"{said}." if kl <= tolerance else f"{said}, above {tolerance:g}: give more --pieces, or a smaller --tolerance."
