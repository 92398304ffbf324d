"""One HTTP exchange: the only file of the client that does I/O.

Every way in which an exchange can fail becomes a Failure here; the callers see no exception but a cancellation.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import aiohttp
import orjson

from aioenv.client.reply import read_reply
from aioenv.client.retry import Failure

T = TypeVar("T")

VERSION_HEADER = "Aioenv-Version"
_PROBE_TIMEOUT = 10.0  # seconds

logger = logging.getLogger("aioenv.client")


class Transport:
    """Owner of the one aiohttp session, which is made at the first exchange, in the loop that then runs."""

    def __init__(self, base_url: str, *, token: str | None, connect_timeout: float) -> None:
        self.base_url = base_url.rstrip("/")
        self._closing = asyncio.Event()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._connect_timeout = connect_timeout
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.keeps_replies = False  # not known to, until a reply says so

    @property
    def closed(self) -> bool:
        return self._closing.is_set()

    async def pause(self, seconds: float) -> None:
        """Sleep, but not beyond the closing: who waits to try again is to hear of it at once."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()

    async def close(self) -> None:
        """Close all connections, also those in use: such exchanges fail with `client_closed`. Harmless if repeated."""
        self._closing.set()
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def post(
        self, route: str, body: bytes, *, timeout: float, shape: Callable[[dict[str, Any]], T]
    ) -> tuple[T] | Failure:
        """POST a JSON body; the reply's result in a 1-tuple, or the Failure. `timeout` (seconds) is for all of it."""
        url = self.base_url + route
        try:
            # Not plain bytes: aiohttp warns about those over 1 MiB, since it writes them in one go.
            async with self._open().post(
                url,
                data=io.BytesIO(body),
                headers={**self._headers, "Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=self._connect_timeout),
                allow_redirects=False,  # a redirected POST would arrive as a GET
            ) as response:
                self._look_at_version(response)
                content = await response.read()
                return read_reply(response.status, content, response.headers.get("Retry-After"), shape)
        except Exception as error:
            if self.closed:
                return Failure("client_closed", f"the client was closed during {route}")
            return _classify(error, url, timeout)

    async def get(self, route: str, *, timeout: float) -> int | None:
        """The status of a GET, or None where there was no reply."""
        if self.unusable() is not None:
            return None
        try:
            async with self._open().get(
                self.base_url + route,
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=timeout),
                allow_redirects=False,
            ) as response:
                self._look_at_version(response)
                await response.read()
                return response.status
        except Exception as error:
            logger.debug("GET %s failed: %r", route, error)
            return None

    async def loaded(self, *, timeout: float) -> bool:
        """Whether the server would take a create, now or in its line."""
        if self.unusable() is not None:
            return False
        try:
            url, limit = self.base_url + "/readyz", aiohttp.ClientTimeout(total=timeout)
            async with self._open().get(url, headers=self._headers, timeout=limit, allow_redirects=False) as response:
                said = orjson.loads(await response.read())
                return response.status == 200 or (isinstance(said, dict) and said.get("loaded") is True)
        except Exception as error:
            logger.debug("GET /readyz failed: %r", error)
            return False

    async def server_keeps_replies(self) -> bool:
        """Whether the server runs a call once however often it is sent, told by its `request_id`.

        aioenv does, and says so by a header in each reply; other services of this protocol don't. Asked by a GET unless
        a reply has said so before.
        """
        if not self.keeps_replies:
            await self.get("/healthz", timeout=_PROBE_TIMEOUT)
        return self.keeps_replies

    def _look_at_version(self, response: aiohttp.ClientResponse) -> None:
        # What has no such header may come from a proxy on the way, and proves nothing.
        if VERSION_HEADER in response.headers:
            self.keeps_replies = True

    def unusable(self) -> Failure | None:
        """Why no exchange can begin here and now, or None. To be asked right before `post`, without awaiting."""
        if self.closed:
            return Failure("client_closed", "the client is closed: make a new one", never_ran=True)
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            return Failure(
                "client_closed", "the client was used in another event loop before: make one per loop", never_ran=True
            )
        return None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._loop = asyncio.get_running_loop()
            # No limits: a trainer has hundreds of calls in flight, and one that waits for a free connection would
            # spend its time-out on that. Idle connections go after 15 s, long before a server drops them, because a
            # step that meets a connection closed at that very moment can't be retried.
            connector = aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=15)
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        return self._session


def _classify(error: Exception, url: str, timeout: float) -> Failure:
    """The Failure that an exception from aiohttp stands for. The order matters: many are subclasses of others."""
    text = str(error) or type(error).__name__
    if isinstance(
        error, aiohttp.ServerTimeoutError
    ):  # no sock_read is set, so it was the connecting that took too long
        return Failure("connection_failed", f"{url}: {text}", retryable=True, never_ran=True)
    if isinstance(error, TimeoutError):
        return Failure("timeout", f"{url}: no whole reply within {timeout:.3g} s", retryable=True)
    if isinstance(error, aiohttp.ClientConnectorError):
        return Failure("connection_failed", f"{url}: {text}", retryable=True, never_ran=True)
    if isinstance(error, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError | OSError):
        return Failure("reply_lost", f"{url}: the connection ended before a whole reply: {text}", retryable=True)
    if isinstance(error, aiohttp.ClientError):  # among them what isn't HTTP at all
        return Failure("bad_reply", f"{url}: {text}", retryable=True)
    logger.error("unforeseen exception in a call to %s", url, exc_info=error)
    return Failure("client_bug", f"{url}: {type(error).__name__}: {text}")
