"""The command `kvpatch calibrate`; what imports torch is imported inside, after what can be refused without it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import KVPatchError
from . import options as given
from .loading import Source, fit, read_prompt
from .options import one_model
from .output import console, print_json, progress, short_errors


def calibrate(  # noqa: PLR0913 - typer: an option is a parameter
    model: given.Model = None,
    model_option: given.ModelOption = None,
    text: Annotated[
        str | None, typer.Option("--text", help="A file of text like yours; - reads standard input.", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("calibration.safetensors"),
    length: Annotated[int, typer.Option(min=2, help="Tokens that are read at a time.")] = 2048,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to read in all, at most.")] = 65536,
    dtype: given.Dtype = "auto",
    device: given.Device = "auto",
    device_map: given.DeviceMap = None,
    revision: given.Revision = None,
    trust_remote_code: given.RemoteCode = False,
    json: given.Json = False,
) -> None:
    """Measure once what q_filter, tri_attention and duo need to know of a model, on a text, and write it to a file.

    The file goes with this model in this dtype: --option calibration=FILE, or kvpatch.load_calibration(FILE) in Python.
    """
    with short_errors():
        source = Source(one_model(model, model_option), dtype, device, device_map, revision, trust_remote_code)
        source.check()
        if text is None:
            raise KVPatchError("Name a text: --text FILE, of a few thousand words or more; - reads standard input.")
        content = read_prompt(text, "--text")
        from ..evaluation.calibrate import calibrate as measure
        from ..storage.calibration import save_calibration

        loaded, tokenizer = source.model(), source.tokenizer()
        ids = tokenizer(content, return_tensors="pt").input_ids.long()[:, :tokens]
        pieces = [fit(loaded, piece, 1)[0] for piece in ids.split(length, 1)]
        out_console = console(stderr=True)
        with progress(out_console) as bar:
            task = bar.add_task("calibrating", total=len(pieces))
            calibration = measure(loaded, pieces, lambda: bar.advance(task))
        save_calibration(calibration, out)
    if json:
        print_json({"file": str(out), "tokens": calibration.tokens, "layers": sorted(calibration.layers)})
    else:
        print(f"{out}: {calibration.tokens:,} tokens, {len(calibration.layers)} layers of {calibration.model['class']}.")
