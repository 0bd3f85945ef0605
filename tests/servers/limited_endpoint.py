"""Makes a real server look like an endpoint that speaks only OpenAI's own API.

It drops the fields that a plain endpoint would ignore, and refuses what that would refuse. Everything else is the real
server's own answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import aiohttp
import msgspec
from aiohttp import web

EXTENSIONS = frozenset(
    {"return_tokens_as_token_ids", "return_token_ids", "prompt_logprobs", "stop_token_ids", "ignore_eos"}
)


@asynccontextmanager
async def limited_endpoint(
    url: str, *, ignores: Collection[str] = EXTENSIONS, token_id_prompts: bool = False, chat_only: bool = False
) -> AsyncIterator[str]:
    """The URL of an endpoint in front of `url`."""

    async def answer(request: web.Request) -> web.Response:
        if chat_only and request.path == "/v1/completions":
            return web.json_response({"detail": "Not Found"}, status=404)
        body = await request.read()
        if body:
            fields = {key: value for key, value in msgspec.json.decode(body).items() if key not in ignores}
            if not token_id_prompts and isinstance(fields.get("prompt"), list):
                return web.json_response({"error": {"message": "prompt: a string is required"}}, status=400)
            body = msgspec.json.encode(fields)
        headers = {"Content-Type": "application/json"}
        async with session.request(request.method, url + request.path, data=body, headers=headers) as reply:
            return web.Response(body=await reply.read(), status=reply.status, content_type="application/json")

    application = web.Application(client_max_size=1 << 26)
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    async with aiohttp.ClientSession() as session:
        await site.start()
        try:
            assert site._server is not None
            port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
            yield f"http://127.0.0.1:{port}"
        finally:
            await runner.cleanup()
