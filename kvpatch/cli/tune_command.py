"""The command `kvpatch tune`; what imports torch is imported inside, after what can be refused without it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path
from typing import Annotated

import typer

from ..errors import KVPatchError
from . import options as given
from .catalogue import check_policy
from .loading import Source, fit, read_prompt
from .options import one_model
from .output import console, note, print_json, progress, short_errors

TRIED = "streaming_llm,h2o,roco,snapkv,adakv,critical_adakv,layer_defensive,key_diff,leverage,compactor"
_LEAST = 8  # tokens of a prompt; a shorter one leaves nothing to choose from


def tune(  # noqa: PLR0913 - typer: an option is a parameter
    model: given.Model = None,
    model_option: given.ModelOption = None,
    text: Annotated[
        str | None, typer.Option("--text", help="A file of text like yours; - reads standard input.", show_default=False)
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="KL from the full cache to allow, nats per token: 0.05 adds 5% perplexity.")
    ] = 0.05,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("profile.json"),
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
    json: given.Json = False,
) -> None:
    """Search on your own text for the policy, k per layer and floor of heads that hold the fewest bytes within a tolerance.

    The file goes with this model in this dtype: kvpatch.patched(model, profile=FILE) in Python.
    """
    with short_errors():
        source = Source(one_model(model, model_option), dtype, device, device_map, revision, trust_remote_code)
        source.check()
        names = [name.strip() for name in policies.split(",") if name.strip()]
        _check(tolerance, names, text)
        content = read_prompt(str(text), "--text")
        from ..evaluation.tune import Search, cut
        from ..evaluation.tune import tune as search_for
        from ..policies import get_policy
        from ..storage.profile import save_profile

        chosen = {name: get_policy(name) for name in names}
        if wanting := [name for name, policy in chosen.items() if policy.score.calibrated]:
            raise KVPatchError(f"--policies {wanting[0]} needs a calibration, which a profile cannot hold: leave it out.")
        loaded, tokenizer = source.model(), source.tokenizer()
        ids = tokenizer(content, return_tensors="pt").input_ids.long()
        first = ids[0, :1].tolist() if int(ids[0, 0]) == tokenizer.bos_token_id else []
        n = min(fit(loaded, ids, max_new_tokens)[0].shape[1], length, ids.shape[1] - max_new_tokens)
        if n < _LEAST:
            raise KVPatchError(
                f"--text {text} has {ids.shape[1]:,} tokens, too few for a prompt and --max-new-tokens {max_new_tokens}: give "
                "a text of a few thousand words, or fewer new tokens."
            )
        found = cut(ids[:, len(first) :].to(loaded.device), n, max_new_tokens, 2 * pieces, first)
        with _quiet(), progress(console(stderr=True)) as bar:
            task = bar.add_task("reading", total=None)
            search = Search(
                loaded, found[::2], tolerance, lambda name: bar.update(task, description=name, advance=1), seed
            )
            bar.update(task, total=search.most(len(chosen)))
            profile = search_for(search, chosen, found[1::2])
        save_profile(profile, out)
    for name, said in search.refused.items():
        note(f"{name} was left out: {said}")
    measured = profile.measured
    if json:
        print_json({"file": str(out), "policy": profile.policy, "options": profile.options, "k": profile.k, **measured})
        return
    options = "".join(f", {name}={value!r}" for name, value in profile.options.items())
    shown = f"k={profile.k:g}" if isinstance(profile.k, float) else f"k={' '.join(f'{k:g}' for k in profile.k)}"
    print(f"{out}: {profile.policy}{options}, {shown}")
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


def _check(tolerance: float, names: list[str], text: str | None) -> None:
    """Raise KVPatchError for what can be refused without torch."""
    if not 0 < tolerance < math.inf:
        raise KVPatchError(f"--tolerance {tolerance} must be a number of nats per token above 0, such as 0.05.")
    if not names:
        raise KVPatchError("--policies names none: give some of `kvpatch policies`, such as h2o,roco.")
    for name in names:
        check_policy(name)
    if text is None:
        raise KVPatchError("The search needs a text: give --text FILE, a few thousand words or more; - reads standard input.")


def _checked(kl: float | None, tolerance: float) -> str:
    """Return the sentence about the pieces that the search did not read."""
    if kl is None:
        return "The text is one piece: nothing was left to check the result on. Give a longer one."
    said = f"On pieces that the search did not read: KL {kl:.4f}"
    return f"{said}." if kl <= tolerance else f"{said}, above {tolerance:g}: give more --pieces, or a smaller --tolerance."
