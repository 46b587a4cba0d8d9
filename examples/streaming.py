"""Text as it is written: to the terminal, to another thread, and to a coroutine.

python -m examples.streaming
"""

from __future__ import annotations

import argparse
import asyncio
from threading import Thread
from typing import Any

from transformers import AsyncTextIteratorStreamer, TextIteratorStreamer, TextStreamer

import kvpatch
from kvpatch.cli.loading import MODELS, load_model, load_tokenizer

PROMPT = "import os\nimport sys\n\n\ndef main(argv):\n    for name in argv[1:]:\n        if os.path."


def to_thread(model: Any, tokenizer: Any, inputs: Any, options: dict[str, Any]) -> list[str]:
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = Thread(target=model.generate, kwargs={**inputs, **options, "streamer": streamer})
    thread.start()
    pieces = list(streamer)
    thread.join()
    return pieces


async def to_coroutine(model: Any, tokenizer: Any, inputs: Any, options: dict[str, Any]) -> list[str]:
    streamer = AsyncTextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = Thread(target=model.generate, kwargs={**inputs, **options, "streamer": streamer})
    thread.start()
    pieces = [piece async for piece in streamer]
    thread.join()
    return pieces


def main(model_name: str = str(MODELS / "llama-python"), policy: str = "tova", k: Any = 0.5, new: int = 16) -> dict[str, Any]:
    model, tokenizer = load_model(model_name, "float32"), load_tokenizer(model_name)
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    options = {"max_new_tokens": new, "do_sample": False}
    with kvpatch.patched(model, policy, k) as patch:
        out = model.generate(**inputs, **options, streamer=TextStreamer(tokenizer))
        thread = to_thread(model, tokenizer, inputs, options)
        coroutine = asyncio.run(to_coroutine(model, tokenizer, inputs, options))
        held = patch.report().held()
    print("in a thread:", thread, "in a coroutine:", coroutine, sep="\n")
    text = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])
    return {"text": text, "thread": thread, "coroutine": coroutine, "held": held, "read": inputs["input_ids"].shape[1]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODELS / "llama-python"))
    main(parser.parse_args().model)
