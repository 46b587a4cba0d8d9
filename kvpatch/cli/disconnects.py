"""Middleware of `kvpatch serve` that ends a request whose client is gone. It imports nothing but asyncio."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


class EndAtDisconnect:
    """An ASGI app around another, which is cancelled if the client hangs up, or the server stops, before it has answered.

    transformers' server ends a request that streams when nobody reads on; for a plain answer it waits until the engine is done.

    Args:
        app: the app.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request through the app; cancel the app if the client is gone before any answer has begun.

        The ASGI server (by way of `Gate`) calls this for each request.
        """
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        messages: asyncio.Queue[Message] = asyncio.Queue()  # from the client, for the app
        begun = asyncio.Event()  # the app has begun its answer

        async def read_messages() -> None:
            """Put the client's messages into `messages`, and return when it has disconnected. Runs as a task beside the app."""
            connected = True
            while connected:
                message = await receive()
                connected = message["type"] != "http.disconnect"
                messages.put_nowait(message)

        async def hand_on_message() -> Message:
            """Return the client's next message: what the app calls to receive one."""
            message = await messages.get()
            if message["type"] == "http.disconnect":
                messages.put_nowait(message)  # for whoever asks again
            return message

        async def send_message(message: Message) -> None:
            """Send a message of the app's answer to the client, and note that the answer has begun."""
            begun.set()
            await send(message)

        working = asyncio.ensure_future(self.app(scope, hand_on_message, send_message))
        watching = asyncio.ensure_future(read_messages())
        try:
            await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
            if working.done() or begun.is_set():  # once it has begun, the app sees the disconnect itself
                await working
        finally:
            watching.cancel()
            if not working.done():
                working.cancel()
                await asyncio.wait((working,))
