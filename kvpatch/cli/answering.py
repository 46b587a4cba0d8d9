"""The engine of `kvpatch serve` as transformers' handlers call it: each request is checked, and runs by its own fields."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import queue
import time
from collections.abc import Callable
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.cli.serving.utils import (
    CBGenerateManager,
    CBStreamer,
    CBWorkerDeadError,
    _StreamError,
    get_response_template,
    response_events_to_chunks,
)

from ..errors import KVPatchError
from ..serving.admission import check_length
from ..serving.conversations import Conversations
from ..serving.sampling import make_sampling, sample_by_request
from .free_memory import EVERY, give_back_memory
from .metrics import ServerMetrics
from .request_fields import AcceptedRequest, RefusedError
from .request_stops import StopStringWatch, WatchedDecoder, cut_tokens
from .request_system import find_messages

_Take = Callable[[Any], None]  # gets an output of the engine
USUAL = 1024  # new tokens of a request that does not say how many


def start_engine(model: Any, options: dict[str, Any], conversations: Conversations | None = None, patience: float = 600) -> Any:
    """Start transformers' continuous batching for `kvpatch serve`; return its manager once its thread can take requests.

    Args:
        model: the patched model.
        options: of ContinuousBatchingConfig.
        conversations: where the engine keeps the caches of requests that have ended; None to keep none.
        patience: seconds to wait for the engine before an error.

    Raises:
        KVPatchError: it does not start.
    """
    config = ContinuousBatchingConfig(**options, use_cuda_graph=False, use_async_batching=False)
    # the engine is greedy: requests that sample add noise to their logits, and have processors of their own
    own = model.generation_config
    greedy = GenerationConfig(do_sample=False, eos_token_id=own.eos_token_id, stop_strings=own.stop_strings)
    manager = model.init_continuous_batching(
        generation_config=greedy, continuous_batching_config=config, conversations=conversations, messages=True
    )
    sample_by_request(manager)  # by each request's own temperature and seed
    manager.start()
    end = time.monotonic() + patience
    while manager.batch_processor is None:  # the engine's thread sets it
        failed = manager.background_thread_status.fatal_error
        if failed is not None or time.monotonic() > end:
            raise KVPatchError(f"The engine does not start: {failed or 'nothing happens'}. Give a smaller --memory or k.")
        time.sleep(0.02)
    return manager


class Answers(CBGenerateManager):
    """The requests of one server.

    Args:
        engine: a manager of continuous batching that runs.
        model: what it runs.
        positions: the most tokens of a prompt and its answer; None for any number.

    Attributes:
        requests: those that were accepted, by their ids, until their answers have been sent.
        metrics: of the server.
    """

    engine: Any

    def __init__(self, engine: Any, model: Any, positions: int | None) -> None:
        """Begin without requests, when `kvpatch serve` starts. `_cb` is the base class's name for the engine."""
        super().__init__()
        self._cb = self.engine = engine
        self.model, self.positions, self.metrics = model, positions, ServerMetrics(engine)
        self.requests: dict[str, AcceptedRequest] = {}  # by request id, until the answer has been sent
        self._closed = 0  # requests whose answers have been sent
        self.conversations: Conversations | None = engine.conversations
        if self.conversations is not None:
            self.conversations.note_reuse = self._note_reuse  # called in `can_store_request_tokens`

    def _note_reuse(self, request_id: str, tokens: int) -> None:
        """Set how many prompt tokens a kept cache spares a request, as `can_store_request_tokens` admits it."""
        request = self.requests.get(request_id)
        if request is not None:
            request.cached = tokens

    def init_cb(self, model: Any, gen_config: Any) -> None:
        """Do nothing, where the base class would start an engine: `start_engine` has done so as the server began."""

    def generate_streaming(  # type: ignore[override]
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[asyncio.Queue[Any], CBStreamer]:
        """Begin a request; return the queue of its text and the streamer that fills it. transformers' handlers call this."""
        request, arguments = self._accept_request(processor, inputs["input_ids"], gen_config, request_id)
        pieces: asyncio.Queue[Any] = asyncio.Queue()
        streamer = _Streamer(self, request_id, processor, pieces, response_parser)

        def take_output(output: Any) -> None:
            """Put a new output's text into `pieces`; after the last, end the request. The engine calls it in the event loop."""
            streamer.put(output)
            request.n_generated = streamer.total_tokens
            if output.error is not None:
                pieces.put_nowait(_StreamError(output.error))
                self._end_request(request_id, "error")
            elif streamer.watch.stopped or output.is_finished():
                self._end_request(request_id, self._name_end(streamer.watch, output, gen_config))
                streamer.end()

        self._add_to_engine(request_id, inputs["input_ids"], gen_config, arguments, take_output, streaming=True)
        return pieces, streamer

    async def generate_non_streaming(  # type: ignore[override]
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """Run a request to its end; return its text, the prompt's length, and the tokens. transformers' handlers call this."""
        ids = inputs["input_ids"]
        request, arguments = self._accept_request(processor, ids, gen_config, request_id)
        last: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        collected: asyncio.Queue[Any] = asyncio.Queue()
        streamer = _Streamer(self, request_id, processor, collected, None)

        def take_output(output: Any) -> None:
            """Look for stop strings in a new output; the one that ends the request goes to `last`. The engine calls this."""
            if request.stops:  # else the engine sends one output, at the end
                streamer.put(output)
            request.n_generated = streamer.total_tokens if request.stops else len(output.generated_tokens)
            if not last.done() and (streamer.watch.stopped or output.is_finished()):
                last.set_result(output)

        self._add_to_engine(request_id, ids, gen_config, arguments, take_output, streaming=bool(request.stops))
        output = await last
        if output.error is not None:
            self._end_request(request_id, "error")
            if self.engine.background_thread_status.fatal_error is not None:
                raise CBWorkerDeadError(f"The engine ended while this request ran: {output.error}")
            raise RefusedError(output.error)
        self._end_request(request_id, self._name_end(streamer.watch, output, gen_config))
        tokens = output.generated_tokens
        if not request.stops:
            return processor.decode(tokens, skip_special_tokens=True), len(ids), tokens
        tokens = tokens[: streamer.total_tokens]  # without those after a stop string
        streamer.end()
        text = "".join(collected.get_nowait() or "" for _ in range(collected.qsize()))
        reparsed = streamer.watch.stopped and get_response_template(processor, model) is not None  # ids will be parsed
        return text, len(ids), cut_tokens(processor, tokens, text) if reparsed else tokens

    def cancel(self, request_id: str) -> None:
        """End a request that nobody awaits, for `close` and `_Streamer.cancel`; nothing if it ended or has no prompt noted."""
        request = self.requests.get(request_id)
        if request is not None and request.n_prompt:
            self._end_request(request_id, "gone")  # from `close`, and where transformers sees a disconnect

    def close(self, request_id: str) -> AcceptedRequest | None:
        """Forget, and return, a request that `Gate` has answered. Each EVERY-th call gives free memory to the system."""
        self.cancel(request_id)
        request = self.requests.pop(request_id, None)
        self._closed += request is not None
        if request is not None and self._closed % EVERY == 0:
            asyncio.get_running_loop().run_in_executor(None, give_back_memory)
        return request

    def _accept_request(
        self, tokenizer: Any, ids: list[int], gen_config: Any, request_id: str
    ) -> tuple[AcceptedRequest, dict[str, Any]]:
        """Check a new request, set gen_config.max_new_tokens, return it and add_request's arguments. Raises RefusedError."""
        self._check_alive(request_id)  # of the base class: raises if the engine has failed
        request = self.requests[request_id]
        request.n_prompt = len(ids)
        room = None if self.positions is None else self.positions - len(ids) + 1  # the last new token is not fed back
        new = request.max_new_tokens or (USUAL if room is None else max(1, min(USUAL, room)))  # most: what the client allows
        try:
            if self.positions is not None:
                check_length(len(ids), new, self.positions, "this server takes {} (--max-model-len)")
            pool = self.engine.pool
            messages = find_messages(tokenizer, request.body, ids) if pool.keeps_system else None  # under --protect system
            pool.check(ids, new, messages=messages)  # raises for a request that the cache could never hold
            config = self._make_config(request.sampling)
        except KVPatchError as error:
            request.end_reason = "refused"
            too_long = room is not None and new > room
            raise RefusedError(str(error), code="context_length_exceeded" if too_long else None) from error
        gen_config.max_new_tokens = new
        penalties = {name: request.sampling.get(f"{name}_penalty", 0.0) for name in ("presence", "frequency")}
        sampling = make_sampling(self.model, config, len(ids), seed=request.sampling.get("seed"), **penalties)
        return request, {"sampling": sampling} | ({} if messages is None else {"messages": messages})

    def _make_config(self, given: dict[str, Any]) -> Any:
        """Return a copy of the model's generation config, changed by a request's sampling fields, for `make_sampling`."""
        config = copy.deepcopy(self.model.generation_config)
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
            if name in given:
                setattr(config, name, given[name] if name == "top_k" else float(given[name]))
        if given.get("top_k", 1) <= 0:
            config.top_k = None
        if given.get("temperature") is not None:
            config.do_sample = given["temperature"] > 0
        elif {"top_p", "top_k", "min_p"} & set(given):
            config.do_sample = True
        if given.get("logit_bias"):
            n_tokens = self.model.config.get_text_config().vocab_size
            beyond = [token for token in given["logit_bias"] if int(token) >= n_tokens]
            if beyond:
                raise KVPatchError(f"logit_bias names token {beyond[0]}, but this model has the tokens 0 to {n_tokens - 1}.")
            config.sequence_bias = {(int(token),): float(bias) for token, bias in given["logit_bias"].items()}
        return config

    def _add_to_engine(
        self, name: str, ids: list[int], gen_config: Any, arguments: dict[str, Any], take_output: _Take, streaming: bool
    ) -> None:
        """Add a request to the engine. It calls `take_output` with each output if `streaming`, else with the last."""
        self.engine.register_result_handler(name, take_output)
        added = self.engine.add_request(
            ids,
            request_id=name,
            streaming=streaming,
            max_new_tokens=gen_config.max_new_tokens,
            eos_token_id=gen_config.eos_token_id,
            **arguments,
        )
        if added is None:
            self._end_request(name, "error")
            raise CBWorkerDeadError("The server is stopping: it takes no new requests.")  # answered with status 503

    @staticmethod
    def _name_end(watch: StopStringWatch, output: Any, gen_config: Any) -> str:
        """Return why a request ended, "length" or "stop", for `_end_request`. A stop clears gen_config.max_new_tokens."""
        ends = gen_config.eos_token_id
        ends = ends if isinstance(ends, (list, tuple)) else [ends]
        if not watch.stopped and output.generated_tokens[-1] not in ends:
            return "length"
        gen_config.max_new_tokens = None  # else transformers' handlers report "length"
        return "stop"

    def _end_request(self, request_id: str, reason: str) -> None:
        """Note why a request has ended, count it, cancel it in the engine; once per request. `take_output` calls it last."""
        request = self.requests.get(request_id)
        if request is None or request.end_reason:
            return
        request.end_reason = reason
        self.engine.cancel_request(request_id)
        with self.engine.output_router._lock:  # it hands outputs to `take_output`
            self.engine.output_router.result_handlers.pop(request_id, None)
        with contextlib.suppress(queue.Empty):
            while True:  # outputs of requests that have no handler any more: nobody else reads them
                self.engine.output_router.output_queue.get_nowait()
        self.metrics.note_end(request)


class _Streamer(CBStreamer):
    """The text of a request, token by token, up to its first stop string."""

    def __init__(self, answers: Answers, request_id: str, processor: Any, pieces: Any, parser: Any) -> None:
        """Begin to stream a request, in the event loop. The engine's outputs go to `put`, and their text to `pieces`.

        pieces: an asyncio queue. parser: of tool calls, or None. The decoder is wrapped, to look for stop strings in its text.
        """
        tokenizer = getattr(processor, "tokenizer", processor)._tokenizer
        super().__init__(answers.engine, request_id, tokenizer, asyncio.get_running_loop(), pieces, response_parser=parser)
        self.answers, self.watch = answers, StopStringWatch(answers.requests[request_id].stops)
        self._decode_stream: Any = WatchedDecoder(self._decode_stream, self.watch)

    def put(self, output: Any) -> None:
        """Decode an output's new tokens, and put their text into the queue. `take_output` calls it with each output.

        `total_tokens` leaves out those after a stop string, since their number depends on the load (the request is cancelled
        between two passes). If the text cannot be parsed, only this request fails: an exception would lose the outputs of other
        requests of the same forward pass.
        """
        try:
            super().put(output)
        except Exception as error:  # of transformers' parser, such as of a call of a tool that is no JSON
            output.status, output.error = type(output.status).FAILED, f"The model's answer cannot be read: {error}"
        self.total_tokens = self._decode_stream.tokens

    def end(self) -> None:
        """Put text that was held back (it might begin a stop string) into the queue, and end it; for `take_output`."""
        rest = self.watch.flush()
        if rest:
            # parser: finds calls
            parsed = [rest] if self._parser is None else response_events_to_chunks(self._parser.feed(rest))
            for item in parsed:
                self._queue.put_nowait(item)
        super().end()

    def cancel(self) -> None:
        """End the request, since its client reads no further; transformers' handlers call this."""
        self.answers.cancel(self._request_id)
