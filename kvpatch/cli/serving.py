"""Implementation of `kvpatch serve`: transformers' own server over a patched model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers

from ..errors import KVPatchError
from ..hooks.versions import check_engine
from ..patching import patch
from ..policies import Policy
from .loading import Source
from .output import note

EXTRA = ("fastapi", "uvicorn", "pydantic", "openai")
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
    """Let transformers' server find this model where it would load one, and tell a client why its request failed."""
    from transformers.cli.serving import model_manager, server

    home: Any = model_manager
    app: Any = server

    class Loaded(model_manager.ModelManager):
        """A model manager whose one model was loaded, and patched, before."""

        def _load_model(self, *args: Any, **kwargs: Any) -> Any:
            return model

        def _load_processor(self, *args: Any, **kwargs: Any) -> Any:
            return tokenizer

    own, build = home.ModelManager, app.build_server
    home.ModelManager = Loaded
    app.build_server = lambda *told, **more: _telling(build(*told, **more))
    try:
        yield
    finally:
        home.ModelManager, app.build_server = own, build


def _telling(app: Any) -> Any:
    """Have a server answer a request that its engine has failed with the reason: else its answer is 500 without a word."""
    from fastapi.responses import JSONResponse

    async def answer(request: Any, error: RuntimeError) -> Any:
        if not str(error).startswith(FAILED):
            raise error
        told = {"message": str(error), "type": "invalid_request_error", "param": None, "code": None}
        return JSONResponse({"error": told}, status_code=400)

    app.add_exception_handler(RuntimeError, answer)
    return app
