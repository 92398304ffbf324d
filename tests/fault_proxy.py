"""A proxy that does harm: between a client and a server, one fault per request, as the test says."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from aioenv.errors import AtCapacity

# What may happen to a request; the first four reach the server.
FAULTS = ("delay", "reset after", "truncate", "junk", "reset before", "500", "503")

# The fault for a request, by its path and body; None is none.
Choose = Callable[[str, dict[str, Any]], str | None]


@dataclass
class FaultProxy:
    url: str = ""
    choose: Choose = lambda path, body: None
    seen: list[tuple[str, str | None]] = field(default_factory=list)


@contextlib.asynccontextmanager
async def fault_proxy(upstream: str) -> AsyncIterator[FaultProxy]:
    """In front of the server at the URL `upstream`. One request for each connection."""
    proxy = FaultProxy()
    target = urlsplit(upstream)
    tasks: set[asyncio.Task[None]] = set()

    async def forward(request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(target.hostname, target.port)
        with contextlib.closing(writer):
            writer.write(request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
            return await reader.read()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lengths = [line for line in head.decode().lower().splitlines() if line.startswith("content-length:")]
        body = await reader.readexactly(int(lengths[0].split(":")[1])) if lengths else b""
        path = head.split()[1].decode()
        fault = proxy.choose(path, json.loads(body)) if body else None
        proxy.seen.append((path, fault))
        if fault == "reset before":
            writer.transport.abort()
            return
        if fault == "500":
            writer.write(_reply("500 Oh", b"<html>Internal Server Error</html>"))
            return
        if fault == "503":
            writer.write(_reply("503 Full", json.dumps(AtCapacity("full").payload()).encode(), "Retry-After: 0"))
            return
        if fault == "delay":
            await asyncio.sleep(0.2)
        answer = await forward(head + body)
        if fault == "reset after":
            writer.transport.abort()
        elif fault == "truncate":
            writer.write(answer[: -len(answer) // 4])
        elif fault == "junk":
            writer.write(_reply("200 OK", b"<html>log in here</html>"))
        else:
            writer.write(answer)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError), contextlib.closing(writer):
            await pass_on(reader, writer)
            await writer.drain()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    listener = await asyncio.start_server(connected, "127.0.0.1", 0, backlog=1000, limit=2**24)
    try:
        proxy.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        yield proxy
    finally:
        listener.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _reply(status: str, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
