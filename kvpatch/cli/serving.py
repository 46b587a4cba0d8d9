"""Implementation of `kvpatch serve`: transformers' own server over a patched model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import transformers

from ..errors import KVPatchError
from ..hooks.versions import check_engine
from ..patching import patch
from ..policies import Policy
from .disconnects import EndAtDisconnect
from .loading import Source
from .output import note

EXTRA = ("fastapi", "uvicorn", "pydantic", "openai")
PATIENCE = 10  # seconds that a server which is told to stop gives to requests under way
FAILED = "CB generation failed"  # how transformers' server begins what it says of such a request


def run(
    source: Source,
    policy: Policy,
    k: Any,
    settings: dict[str, Any],
    host: str,
    port: int,
    engine: dict[str, Any],
    background: bool = False,
) -> Any:
    """Load the model, patch it, and serve it until interrupted; returns the server.

    settings: keyword arguments of `patch`. engine: options of transformers' server, by name. background: serve in a thread, and
    return at once.

    Raises:
        KVPatchError: a package is missing, or the model or a setting cannot work.
    """
    check_engine(transformers.__version__)
    _check_extra()
    from transformers.cli.serve import Serve

    model, tokenizer = source.model(), source.tokenizer()
    patched = patch(model, policy, k, **settings)
    note(f"{patched}\nserving {source.name} at http://{host}:{port}/v1 (the client's model name is {source.name})")
    try:
        with _loaded(model, tokenizer):
            return Serve(
                source.name,
                continuous_batching=True,
                host=host,
                port=port,
                non_blocking=background,
                device=str(model.device),
                **engine,
            )
    finally:
        if not background:
            patched.remove()


def _check_extra() -> None:
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise KVPatchError(
            f"`kvpatch serve` runs transformers' server, which needs more packages: pip install {' '.join(EXTRA)}"
        )


@contextmanager
def _loaded(model: Any, tokenizer: Any) -> Iterator[None]:
    """Have transformers' server serve this model where it would load one, list no other, stop in time, and answer as mended."""
    import uvicorn
    from transformers.cli.serving import model_manager, server

    home: Any = model_manager
    app: Any = server
    network: Any = uvicorn
    started = int(time.time())

    class Loaded(model_manager.ModelManager):
        """A model manager whose one model was loaded, and patched, before."""

        def _load_model(self, *args: Any, **kwargs: Any) -> Any:
            return model

        def _load_processor(self, *args: Any, **kwargs: Any) -> Any:
            return tokenizer

        def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:  # type: ignore[override]
            """List the one model that is served, by the name that a request gives; transformers lists the Hub's cache."""
            return [{"id": self.force_model, "object": "model", "created": started, "owned_by": "kvpatch"}]

    own, build, config = home.ModelManager, app.build_server, network.Config
    home.ModelManager = Loaded
    network.Config = partial(config, timeout_graceful_shutdown=PATIENCE)  # else it waits for every client
    app.build_server = lambda *told, **more: _mend_app(build(*told, **more), more["generation_state"])
    try:
        yield
    finally:
        home.ModelManager, app.build_server, network.Config = own, build, config


def _mend_app(app: Any, state: Any) -> Any:
    """Have a server give the reason for which its engine failed a request, and end those whose client is gone.

    Without this the answer to the first is status 500 without a word, and the second run to their end.

    Args:
        app: transformers' app.
        state: the app's GenerationState, which has the engine.
    """
    from fastapi.responses import JSONResponse

    async def answer(request: Any, error: RuntimeError) -> Any:
        if not str(error).startswith(FAILED):
            raise error
        told = {"message": str(error), "type": "invalid_request_error", "param": None, "code": None}
        return JSONResponse({"error": told}, status_code=400)

    def cancel(request: str) -> None:
        engine = state._cb_manager._cb if state._cb_manager is not None else None
        if engine is not None:  # which begins with the first request
            engine.cancel_request(request)

    app.add_exception_handler(RuntimeError, answer)
    app.add_middleware(EndAtDisconnect, cancel=cancel)
    return app
