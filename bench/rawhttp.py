"""HTTP/1.1 as cheap as Python allows: the load generator shares the cores with what it measures.

Keep-alive only, replies with a Content-Length only; what any server of the protocol sends.
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any
from urllib.parse import urlsplit


class BadReply(Exception):
    """What came is not a reply that this client understands, or the connection ended before it did."""


def address(url: str) -> tuple[str, int]:
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme != "http" or not parts.hostname:
        raise SystemExit(f"{url!r} is not an http:// URL")
    return parts.hostname, parts.port or 80


def post(host: str, route: str, body: bytes) -> bytes:
    """The whole request."""
    head = f"POST /{route} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def split_reply(data: bytes | bytearray) -> tuple[int, bytes] | None:
    """Status and body of a reply; None as long as it is not complete. Raises BadReply."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return None
    head = bytes(data[:end]).lower()
    at = head.find(b"\r\ncontent-length:")
    if at < 0:
        raise BadReply(f"no Content-Length: {head[:200]!r}")
    size = int(head[at + 17 :].split(b"\r\n", 1)[0])
    if len(data) < end + 4 + size:
        return None
    return int(head[9:12]), bytes(data[end + 4 : end + 4 + size])


class BlockingClient:
    """One connection, one request at a time. A context manager."""

    def __init__(self, url: str, limit: float = 300.0) -> None:
        self._host, port = address(url)
        self._socket = socket.create_connection((self._host, port), timeout=limit)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def request(self, route: str, body: dict[str, Any]) -> bytes:
        """One to give to `exchange`."""
        return post(self._host, route, json.dumps(body).encode())

    def exchange(self, request: bytes) -> tuple[int, bytes]:
        """Status and body. Raises BadReply and OSError."""
        self._socket.sendall(request)
        data: bytes | bytearray = b""
        while True:
            more = self._socket.recv(262144)
            if not more:
                raise BadReply("the server closed the connection")
            if not data:
                data = more  # nearly always all of it
            elif isinstance(data, bytes):
                data = bytearray(data + more)
            else:
                data += more
            reply = split_reply(data)
            if reply is not None:
                return reply

    def call(self, route: str, **body: Any) -> Any:
        """The reply's `data`. Raises SystemExit where the server refuses."""
        status, raw = self.exchange(self.request(route, body))
        reply = json.loads(raw)
        if status != 200 or not reply["success"]:
            raise SystemExit(f"/{route} was answered {status}: {reply.get('detail')}")
        return reply["data"]


class Connection(asyncio.Protocol):
    """One connection of an `AsyncClient`."""

    def __init__(self) -> None:
        self.open = False
        self._transport: asyncio.Transport | None = None
        self._data = bytearray()
        self._waiter: asyncio.Future[tuple[int, bytes]] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.open = transport, True

    async def exchange(self, request: bytes) -> tuple[int, bytes]:
        assert self._transport is not None
        self._data.clear()
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def data_received(self, data: bytes) -> None:
        self._data += data
        if self._waiter is None or self._waiter.done():
            return
        try:
            reply = split_reply(self._data)
        except (BadReply, ValueError) as error:
            self._waiter.set_exception(BadReply(str(error)))
            self.close()
            return
        if reply is not None:
            self._waiter.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(BadReply(f"the connection ended before the reply ({exc})"))

    def close(self) -> None:
        self.open = False
        if self._transport is not None:
            self._transport.abort()


class AsyncClient:
    """As many connections as there are requests at once; each is used again."""

    def __init__(self, url: str, limit: float = 300.0) -> None:
        self._host, self._port = address(url)
        self._limit = limit
        self._idle: list[Connection] = []

    async def exchange(self, route: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and what the reply's JSON holds. Raises BadReply, OSError, TimeoutError."""
        request = post(self._host, route, json.dumps(body).encode())
        connection = await self._connection()
        try:
            async with asyncio.timeout(self._limit):
                status, raw = await connection.exchange(request)
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        try:
            return status, json.loads(raw)
        except ValueError:
            raise BadReply(f"status {status}, not JSON: {raw[:200]!r}") from None

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(Connection, self._host, self._port)
        return made

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
