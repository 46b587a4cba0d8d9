"""The commands `kvpatch calibrate` and `kvpatch learn`.

Whatever imports torch is imported inside, after what can be refused without it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import KVPatchError
from . import options as given
from .catalogue import check_choice
from .loading import Source, fit_prompt
from .options import TextFile, find_model_and_text
from .output import make_console, make_progress_bar, print_json, short_errors

_TEACHERS = ("kvzip_plus", "kvzip")
_Length = Annotated[int, typer.Option(min=2, help="Tokens that are read at a time.")]
_Tokens = Annotated[int, typer.Option(min=2, help="Tokens to read in all, at most.")]


def calibrate(  # noqa: PLR0913 - typer: an option is a parameter
    model: given.Model = None,
    file: given.Text = None,
    model_option: given.ModelOption = None,
    text: given.TextOption = None,
    out: given.Out = Path("calibration.safetensors"),
    length: _Length = 2048,
    tokens: _Tokens = 65536,
    dtype: given.Dtype = "auto",
    device: given.Device = "auto",
    device_map: given.DeviceMap = None,
    revision: given.Revision = None,
    trust_remote_code: given.RemoteCode = False,
    option: given.NoOption = None,
    json: given.Json = False,
) -> None:
    """Measure once what q_filter, tri_attention and duo need to know of a model, on a text, and write it to a file.

    The file goes with this model in this dtype: --option calibration=FILE, or kvpatch.load_calibration(FILE) in Python.
    """
    with short_errors():  # typer runs this for `kvpatch calibrate`; the docstring is its help
        name, text_file = find_model_and_text(model, file, model_option, text, option)
        source = Source(name, dtype, device, device_map, revision, trust_remote_code)
        _measure_text(source, text_file, out, (length, tokens), json)


def learn(  # noqa: PLR0913 - as above
    model: given.Model = None,
    file: given.Text = None,
    model_option: given.ModelOption = None,
    text: given.TextOption = None,
    out: given.Out = Path("learned.safetensors"),
    teacher: Annotated[
        str, typer.Option(help="Policy to learn from: kvzip_plus, or kvzip where the model's output projection is not known.")
    ] = "kvzip_plus",
    length: _Length = 2048,
    tokens: _Tokens = 65536,
    dtype: given.Dtype = "auto",
    device: given.Device = "auto",
    device_map: given.DeviceMap = None,
    revision: given.Revision = None,
    trust_remote_code: given.RemoteCode = False,
    option: given.NoOption = None,
    json: given.Json = False,
) -> None:
    """Learn once, for the policy `learned`, which tokens a second reading of your text attends to, and write that to a file.

    The text is read twice, piece by piece. The file is a calibration and is used as one: --policy learned --option
    calibration=FILE, or kvpatch.load_calibration(FILE) in Python.
    """
    with short_errors():  # typer runs this for `kvpatch learn`; the docstring is its help
        check_choice("teacher", teacher, _TEACHERS)
        name, text_file = find_model_and_text(model, file, model_option, text, option)
        source = Source(name, dtype, device, device_map, revision, trust_remote_code)
        _measure_text(source, text_file, out, (length, tokens), json, teacher)


def _measure_text(
    source: Source, text: TextFile, out: Path, sizes: tuple[int, int], json: bool, learn_from: str | None = None
) -> None:
    """Do the work of `calibrate`, or of `learn` if a teacher is named: run the model on a text, and save what is measured.

    sizes: tokens of a piece of the text, and of all pieces. learn_from: name of the policy whose scores are learned.
    """
    source.check()
    if out.is_dir() or not os.access(out.parent, os.W_OK):  # now, since measuring takes minutes
        raise KVPatchError(
            f"--out {out} cannot be written: give the name of a file in a folder that exists, where you may write."
        )
    content, (length, tokens) = text.read_text(), sizes  # before torch is imported, since that takes seconds
    from ..evaluation.calibrate import calibrate as measure
    from ..evaluation.calibrate import make_teacher
    from ..storage.calibration import save_calibration

    loaded, tokenizer = source.model(), source.tokenizer()
    teacher = None if learn_from is None else make_teacher(tokenizer, length, learn_from)
    ids = tokenizer(content, return_tensors="pt").input_ids.long()[:, :tokens]
    pieces = _cut_text(loaded, ids, length, teacher)
    with make_progress_bar(make_console(stderr=True)) as bar:
        task = bar.add_task("calibrating" if teacher is None else "learning", total=len(pieces))
        calibration = measure(loaded, pieces, lambda: bar.advance(task), teacher)  # feeds each piece to the model
    save_calibration(calibration, out)
    if json:
        print_json({"file": str(out), "tokens": calibration.tokens, "layers": sorted(calibration.layers)})
    else:
        print(f"{out}: {calibration.tokens:,} tokens, {len(calibration.layers)} layers of {calibration.model['class']}.")


def _cut_text(model: Any, ids: Any, length: int, teacher: Any) -> list[Any]:
    """Cut a text's ids [1,n] into pieces of at most `length` tokens that fit the model's positions; `_measure_text` calls it.

    A teacher (policy to learn from) reads each piece twice, the second time after an instruction, so its pieces are shorter.
    Raises KVPatchError if no more than the teacher's sinks (first tokens, never evicted) would fit. Changes nothing.
    """
    from ..evaluation.teacher_forcing import positions_of

    limit = positions_of(model)
    length = length if limit is None else min(length, limit)
    if teacher is not None and limit is not None:
        from ..policies.needs.second_reading import Rereading

        # longest(0): the instruction's length; the rest of the positions holds the piece twice
        length = min(length, (limit - teacher.needs.find(Rereading).longest(0)) // 2)
        if length <= teacher.scope.sinks:
            raise KVPatchError(f"The model has {limit} positions, too few to read a text twice: use another policy.")
    # 0 new tokens: moves each to the device and checks its ids
    return [fit_prompt(model, piece, 0)[0] for piece in ids.split(length, 1)]
