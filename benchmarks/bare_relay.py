"""The least a relay can do: each chat request forwarded by aiohttp, each answer passed back.

    python -m benchmarks.bare_relay --upstream http://127.0.0.1:10086 --port 8001

The yardstick of proxy_overhead.py: no decoding, no ledger, no error shapes; uvloop, as the proxy.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import AsyncIterator

import aiohttp
import uvloop
from aiohttp import web

SESSION = web.AppKey("session", aiohttp.ClientSession)
UPSTREAM = web.AppKey("upstream", str)


async def health(request: web.Request) -> web.Response:
    return web.Response()


async def relay(request: web.Request) -> web.StreamResponse:
    body = await request.read()
    headers = {"Content-Type": request.content_type}
    session, url = request.app[SESSION], request.app[UPSTREAM] + request.path
    async with session.post(url, data=body, headers=headers) as answer:
        if answer.content_type != "text/event-stream":
            raw = await answer.read()
            return web.Response(body=raw, status=answer.status, content_type=answer.content_type)
        shown = web.StreamResponse(
            status=answer.status, headers={"Content-Type": "text/event-stream"}
        )
        await shown.prepare(request)
        async for chunk in answer.content.iter_any():
            await shown.write(chunk)
        await shown.write_eof()
        return shown


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


def leave_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upstream", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--until-stdin-closes", action="store_true", help="For a parent's sake.")
    args = parser.parse_args()
    if args.until_stdin_closes:
        threading.Thread(target=leave_with_parent, daemon=True).start()
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
