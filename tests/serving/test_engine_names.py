"""The names of transformers that continuous batching under a budget leans on, none of which is promised.

A failure here says which of them an upgrade has moved: mend kvpatch/serving/engine.py and pool.py, or
kvpatch/cli/serving.py.
"""

import inspect
import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers.cli.serving import chat_completion, response, utils
from transformers.generation import continuous_batching
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import cb_logits_processors, continuous_api

import kvpatch
from kvpatch.cli.gate import _BROKEN
from kvpatch.serving import engine
from kvpatch.serving.pool import RequestPool
from kvpatch.serving.sampling import RequestSampling
from tests.helpers.tiny import make

FOLDER = Path(continuous_batching.__file__).parent
NOT_REACHED = {  # of the paged cache: behind what is switched off (OFF), and in the paged cache itself
    "__init__", "update", "fill_block_table", "cache_allocators.items", "cache_allocators.values", "items", "values",
}  # fmt: skip


def used(text: str) -> set[str]:
    return set(re.findall(r"\bcache\.(pool\.\w+|\w+)", text))


@pytest.mark.parametrize("file", ["scheduler", "continuous_api", "input_outputs", "model_runner", "offloading_manager"])
def test_the_pool_has_what_the_engine_asks_of_a_cache(file):
    with kvpatch.patched(make("llama_gqa"), "h2o", 24) as patch:
        pool = RequestPool(patch.settings, 8, 16, 64, torch.device("cpu"))
    for name in used((FOLDER / f"{file}.py").read_text()) - NOT_REACHED:
        owner, _, attribute = name.rpartition(".")
        assert hasattr(getattr(pool, owner) if owner else pool, attribute), f"{file}.py asks for cache.{name}"


def test_methods_take_what_they_took():
    for name in (
        "can_store_request_tokens", "free_blocks", "extend_read_and_write_indices", "prepare_fork_request",
        "count_storable_requests", "count_new_complete_blocks", "mark_complete_blocks", "perform_cache_copy",
    ):  # fmt: skip
        own, theirs = (
            list(inspect.signature(getattr(one, name)).parameters)
            for one in (RequestPool, continuous_batching.cache.PagedAttentionCache)
        )
        assert own == theirs, name
    for owner, name, wanted in (
        (continuous_api.FIFOScheduler, "_schedule_request", ["self", "state", "request_tokens", "token_budget"]),
        (continuous_api.FIFOScheduler, "schedule_batch", ["self", "token_budget", "cache_budget"]),
        (continuous_api.FIFOScheduler, "add_waiting_request", ["self", "state"]),
        (continuous_api.FIFOScheduler, "_infer_request_tokens", ["self", "state"]),
        (continuous_api.FIFOScheduler, "finish_request", ["self", "request_id"]),
        (continuous_api.FIFOScheduler, "clear_cancelled_requests", ["self"]),
        (engine.ContinuousBatchProcessor, "_generation_step", ["self", "model"]),
        (engine.ContinuousBatchingManager, "_generation_step", ["self"]),
        (engine.ContinuousBatchingManager, "_create_batch_processor", ["self"]),
        (engine.ContinuousBatchingManager, "switch_to_cb_friendly_attn", ["self", "model", "auto_switch_to_flash"]),
    ):
        assert list(inspect.signature(getattr(owner, name)).parameters)[: len(wanted)] == wanted, name


def test_what_conversations_take_of_the_scheduler():
    """kvpatch/serving/admission.py chooses what a request begins with where the engine looks for its own prefixes."""
    scheduler = (FOLDER / "scheduler.py").read_text()
    for name in ("self._requests_to_cancel", "self.active_requests", "self.waiting_requests"):
        assert name in scheduler, name
    assert "request_tokens = self._infer_request_tokens(" in scheduler
    assert "self.inputs_and_outputs.compute_stream" in inspect.getsource(continuous_api)


def test_options_that_are_switched_off_exist():
    for name, _, what in engine.OFF:
        assert hasattr(ContinuousBatchingConfig(), name), f"{what} has another name"
    assert engine.KEPT_MANAGER in inspect.getsource(continuous_api)


def test_a_request_has_what_is_read_of_it():
    state = continuous_batching.requests.RequestState(request_id="a", initial_tokens=[1, 2])
    for name in (
        "initial_tokens",
        "remaining_prefill_tokens",
        "tokens_to_process",
        "max_new_tokens",
        "_new_tokens_limit",
        "position_offset",
        "generated_tokens",
        "num_children",
        "error",
    ):
        assert hasattr(state, name), name


def test_what_is_taken_of_the_server():
    """kvpatch/cli/serving.py and answering.py put a model, an engine and errors into it."""
    folder = Path(transformers.__file__).parent / "cli"
    inside = (folder / "serve.py").read_text().partition("    def __init__")[2]
    for name in ("model_manager import ModelManager", "server import build_server"):
        assert f"from .serving.{name}" in inside, f"{name}: where the server looks for it when it starts"
    for file in ("chat_completion", "completion", "response"):
        text = (folder / "serving" / f"{file}.py").read_text()
        assert "gen_manager = self.generation_state.get_manager(" in text, file
        assert "gen_config.max_new_tokens" in text or file == "response", f"{file}: what it tells the end of a text by"
    streamer = inspect.getsource(utils.CBStreamer)
    for name in ("self._decode_stream.step(self._tokenizer", "self._queue.put_nowait", "self._parser.feed("):
        assert name in streamer, name
    router = inspect.getsource(continuous_api.OutputRouter)
    for name in ("self.output_queue", "self.result_handlers", "self._lock"):
        assert name in router, name
    assert _BROKEN.decode() in (folder / "serving" / "completion.py").read_text().replace("{{", "{"), "an error in a stream"


def test_what_places_of_messages_are_read_by():
    """kvpatch/cli/request_system.py renders a request's messages as the handlers do, by methods that need no handler."""
    for owner, name, wanted in (
        (chat_completion.ChatCompletionHandler, "get_processor_inputs_from_messages", ["messages", "modality"]),
        (response.ResponseHandler, "_normalize_tools", ["tools"]),
        (response.ResponseHandler, "_normalize_input", ["body"]),
    ):
        assert isinstance(inspect.getattr_static(owner, name), staticmethod), name
        assert list(inspect.signature(getattr(owner, name)).parameters) == wanted, name
    assert utils.Modality.LLM


def test_what_is_taken_of_logits_processors():
    """kvpatch/serving/sampling.py is one of them."""
    listed = cb_logits_processors.ContinuousBatchingLogitsProcessorList(cb_logits_processors.LogitsProcessorList())
    for name in ("tensors_required", "do_processing", "supported_keys", "logits_processor", "_retrieve_processors_kwargs"):
        assert hasattr(listed, name), name
    for name in ("_get_logits_processor", "_prepare_special_tokens"):
        assert callable(getattr(transformers.GenerationMixin, name)), name
    assert list(inspect.signature(RequestSampling.__call__).parameters) == list(
        inspect.signature(cb_logits_processors.ContinuousBatchingLogitsProcessor.__call__).parameters
    )
