"""A minimal relay: aiohttp forwards each chat request and passes the answer back.

    python -m benchmarks.proxy_parts.bare_relay --upstream http://127.0.0.1:10086 --port 8001

`benchmarks.proxy_overhead` compares the proxy with this relay. The relay decodes nothing, keeps no
ledger, and does not translate errors. Like the proxy, the relay runs on uvloop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import uvloop
from aiohttp import web

from benchmarks.proxy_parts.helper_process import parse_arguments

SESSION = web.AppKey("session", aiohttp.ClientSession)
UPSTREAM = web.AppKey("upstream", str)


async def health(request: web.Request) -> web.Response:
    return web.Response()


async def relay(request: web.Request) -> web.StreamResponse:
    """Forward a request and pass the answer back. A streamed answer is passed back chunk by
    chunk."""
    body = await request.read()
    headers = {"Content-Type": request.content_type}
    session, url = request.app[SESSION], request.app[UPSTREAM] + request.path
    async with session.post(url, data=body, headers=headers) as upstream:
        if upstream.content_type != "text/event-stream":
            raw = await upstream.read()
            return web.Response(
                body=raw, status=upstream.status, content_type=upstream.content_type
            )
        response = web.StreamResponse(
            status=upstream.status, headers={"Content-Type": "text/event-stream"}
        )
        await response.prepare(request)
        async for chunk in upstream.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
        return response


async def hold_session(app: web.Application) -> AsyncIterator[None]:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
        app[SESSION] = session
        yield


def create_app(upstream: str) -> web.Application:
    app = web.Application()
    app[UPSTREAM] = upstream
    app.cleanup_ctx.append(hold_session)
    app.router.add_get("/health", health)
    app.router.add_post("/v1/chat/completions", relay)
    return app


def main() -> None:
    args = parse_arguments((__doc__ or "").partition("\n\n")[0])
    loop = uvloop.new_event_loop()
    web.run_app(
        create_app(args.upstream),
        host="127.0.0.1",
        port=args.port,
        loop=loop,
        access_log=None,
        print=None,
    )


if __name__ == "__main__":
    main()
