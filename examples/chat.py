"""A small client of OpenAI-compatible chat endpoints (vLLM, SGLang, llama.cpp, OpenAI, …), on aiohttp.

One call, `Chat.complete`: a conversation in, the assistant's message out, streamed or not, tried again where that may
help. Nothing here knows of tasks or environments.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from aioenv.schema import ActionMessage, ToolCall

logger = logging.getLogger("chat")

MAX_WAIT = 60.0
# Endpoints agree on neither status nor code where a conversation is too long; their texts have one of these in them.
_TOO_LONG = re.compile(r"context.?(length|window|size)|maximum model length|prompt is too long|too many tokens", re.I)
_CODES = {401: "chat_unauthorized", 403: "chat_unauthorized", 404: "chat_not_found", 429: "chat_rate_limited"}
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")  # a CR at the very end may be half of a CRLF


class ChatError(Exception):
    """Why there is no answer. `code` is for programs, and begins with `chat_`; `retryable`: it may be there later."""

    def __init__(self, code: str, text: str, *, retryable: bool = False, retry_after: float | None = None) -> None:
        super().__init__(text)
        self.code = code
        self.retryable = retryable
        self.retry_after = retry_after


class Chat:
    """One model at one endpoint, for any number of calls at once. Use it as `async with Chat(…) as chat:`.

    options   more keys for the body of each request: `temperature`, `max_tokens`, `stop`, `tools`, …
    timeout   seconds that one try may take in all
    tries     how often a call is tried. The waits between begin with about `backoff` seconds and double, unless the
              endpoint's Retry-After says how long
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str = "",
        stream: bool = True,
        options: Mapping[str, Any] | None = None,
        timeout: float = 300.0,
        tries: int = 6,
        backoff: float = 1.0,
    ) -> None:
        if urlsplit(base_url).scheme not in ("http", "https") or not urlsplit(base_url).hostname:
            raise ValueError(f"the base URL must look like http://127.0.0.1:8000/v1, not {base_url!r}")
        if not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("the API key must be printable ASCII: it goes into a header")
        self.url = f"{base_url.rstrip('/')}/chat/completions"
        self._request = {**(options or {}), "model": model, "stream": stream}
        self._api_key = api_key
        self._timeout = aiohttp.ClientTimeout(total=timeout, sock_connect=30)
        self._tries = tries
        self._backoff = backoff

    async def __aenter__(self) -> Chat:
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        # No limit to the connections: how many calls there are at once is the caller's to say.
        connector = aiohttp.TCPConnector(limit=0)
        self._http = aiohttp.ClientSession(connector=connector, headers=headers, timeout=self._timeout)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._http.close()

    async def complete(self, messages: Sequence[Mapping[str, Any]]) -> ActionMessage:
        """The assistant's next message. Raises ChatError, and nothing else, after the last try."""
        done = 0
        while True:
            try:
                return await self._try(messages)
            except ChatError as error:
                done += 1
                if not error.retryable or done >= self._tries:
                    raise
                wait = wait_before_retry(done, self._backoff, error.retry_after)
                logger.warning("try %d of %d failed, next in %.1f s: %s", done, self._tries, wait, error)
            await asyncio.sleep(wait)

    async def _try(self, messages: Sequence[Mapping[str, Any]]) -> ActionMessage:
        try:
            body = {**self._request, "messages": list(messages)}
            async with self._http.post(self.url, json=body, allow_redirects=False) as response:
                if response.status != 200:
                    raise refusal(response.status, await response.text(errors="replace"), response.headers)
                return await _read(response)
        except ChatError as error:
            told = self._tellable(str(error))
            raise ChatError(error.code, told, retryable=error.retryable, retry_after=error.retry_after) from None
        except TimeoutError:
            raise ChatError("chat_timeout", f"no whole answer in {self._timeout.total:g} s", retryable=True) from None
        except (aiohttp.ClientError, OSError) as error:
            text = self._tellable(str(error) or type(error).__name__)
            raise ChatError("chat_connection_failed", text, retryable=True) from None
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            # Not JSON, or of another shape. Gateways send such things while what is behind them restarts.
            text = self._tellable(f"the reply is no chat completion: {error!r}")
            raise ChatError("chat_bad_reply", text, retryable=True) from None

    def _tellable(self, text: str) -> str:
        """One line of no great length, and without the key: some endpoints repeat it when they refuse it."""
        if self._api_key:
            text = text.replace(self._api_key, "[API key]")
        return " ".join(text.split())[:500]


class EventParser:
    """Takes a stream of server-sent events apart, however its bytes are cut. Of each event, only the data counts."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[str]:
        """The data of the events that are complete with this chunk."""
        # Lines are cut as bytes: in UTF-8 no part of a character looks like a line's end.
        *lines, self._rest = _LINE_END.split(self._rest + chunk)
        events = []
        for line in lines:
            field, _, value = line.decode("utf-8", "replace").removeprefix("\ufeff").partition(":")
            if field == "data":  # a comment has an empty field
                self._data.append(value.removeprefix(" "))
            elif not line and self._data:
                events.append("\n".join(self._data))
                self._data = []
        return events


class Answer:
    """An assistant's message that grows with each chunk of a stream; a reply that isn't streamed is one whole chunk."""

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self._begun = False
        self._content = ""
        self._reasoning = ""
        self._calls: dict[int, dict[str, str]] = {}

    def add(self, chunk: dict[str, Any]) -> None:
        if error := chunk.get("error"):  # amid a stream there is no status any more to tell it by
            status = error.get("code") if isinstance(error, dict) else None
            raise refusal(status if isinstance(status, int) else 500, json.dumps(chunk), {})
        for choice in chunk.get("choices") or []:  # the chunk that tells the usage has none
            self._begun = True
            part = choice.get("delta") or choice.get("message") or {}
            self._content += part.get("content") or ""
            self._reasoning += part.get("reasoning_content") or part.get("reasoning") or ""
            for number, piece in enumerate(part.get("tool_calls") or []):
                call = self._calls.setdefault(piece.get("index", number), {"id": "", "name": "", "arguments": ""})
                call["id"] = piece.get("id") or call["id"]
                call["name"] += piece["function"].get("name") or ""
                call["arguments"] += piece["function"].get("arguments") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def message(self) -> ActionMessage:
        """What was said. What was thought before is not part of it, and is kept in the metadata."""
        if not self._begun:
            raise ValueError("there is no choice in it")
        said, thought = _whole(self._content), ""
        if "</think>" in said:
            thought, _, said = said.partition("</think>")
            said = said.lstrip()
        calls = [ToolCall(**{**call, "id": call["id"] or f"call_{n}"}) for n, call in sorted(self._calls.items())]
        reasoning = _whole(self._reasoning) + thought.replace("<think>", "")
        metadata = {"finish_reason": self.finish_reason, "reasoning": reasoning.strip()}
        return ActionMessage(content=said, tool_calls=calls, metadata=metadata)


async def _read(response: aiohttp.ClientResponse) -> ActionMessage:
    answer = Answer()
    if response.content_type != "text/event-stream":  # some endpoints don't stream, whatever they are asked
        answer.add(await response.json(content_type=None))
        return answer.message()
    parser = EventParser()
    async for chunk in response.content.iter_any():
        for data in parser.feed(chunk):
            if data.strip() == "[DONE]":
                return answer.message()
            answer.add(json.loads(data))
    if answer.finish_reason is None:
        raise ChatError("chat_connection_failed", "the stream ended before the answer did", retryable=True)
    return answer.message()


def refusal(status: int, body: str, headers: Mapping[str, str]) -> ChatError:
    """What a reply that is no answer means."""
    text = f"{status}: {_described(body)}"
    # The key is what is wrong, or the path, whatever else their texts mention.
    if status not in _CODES and _TOO_LONG.search(body):
        return ChatError("chat_context_too_long", text)
    code = _CODES.get(status) or ("chat_server_error" if status >= 500 else "chat_refused")
    after = headers.get("Retry-After", "")
    retry_after = float(after) if re.fullmatch(r"\d+(\.\d+)?", after) else None  # else it's a date: we wait as usual
    # Nobody pays an empty account within the waits of a retry.
    retryable = (status in (408, 429) or status >= 500) and "insufficient_quota" not in body
    return ChatError(code, text, retryable=retryable, retry_after=retry_after)


def wait_before_retry(done: int, backoff: float, retry_after: float | None) -> float:
    """Seconds to wait after so many tries. Never the same twice, or all episodes would come back at one moment."""
    wait = backoff * 2.0 ** (done - 1) if retry_after is None else retry_after
    return min(wait, MAX_WAIT) * random.uniform(1.0, 1.5)


def _described(body: str) -> str:
    """The message in an error's body, which each kind of server puts elsewhere."""
    try:
        said = json.loads(body)
    except ValueError:
        return body
    for key in ("error", "detail", "message"):
        said = said.get(key, said) if isinstance(said, dict) else said
    return said if isinstance(said, str) else body


def _whole(text: str) -> str:
    """The text with the two halves of a character joined that JSON escaped in two chunks."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
