"""One logical call: tries, waits and what becomes of a failure. The I/O is transport's, the decisions are retry's."""

from __future__ import annotations

import logging
import os
import random
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from aioenv.client.request import encode
from aioenv.client.retry import Failure, Policy, next_delay, repeatable, to_report
from aioenv.client.stats import OnFailure, Stats, tell
from aioenv.client.transport import Transport
from aioenv.errors import CallFailed

T = TypeVar("T")

logger = logging.getLogger("aioenv.client")

# Its own, because trainers seed the global one: equal seeds on all ranks would make all ranks retry at the same
# moments, and drawing from it would change what the trainer draws.
_random = random.Random()
os.register_at_fork(after_in_child=_random.seed)  # else forked workers would all draw the same, too
uniform = _random.uniform


class Caller:
    """Makes the calls of one client. `timeout` is the limit of each try in seconds."""

    def __init__(
        self,
        transport: Transport,
        policy: Policy,
        *,
        timeout: float,
        raises: bool,
        on_failure: OnFailure | None = None,
    ) -> None:
        self.stats = Stats()
        self._on_failure = on_failure
        self._transport = transport
        self._policy = policy
        self.timeout = timeout
        self._raises = raises

    async def call(
        self,
        route: str,
        body: Callable[[], dict[str, Any]],
        shape: Callable[[dict[str, Any]], T],
        failed: Callable[[CallFailed], T],
        max_retry: int | None,
        *,
        idempotent: bool = True,
    ) -> T:
        """The call's result, or after its last try what `failed` makes of the error.

        `body` gives the request's JSON object and may raise BadRequest; `shape` takes the result out of the reply and
        may raise WrongShape. Raises CallFailed where the client was asked to raise, and else nothing.
        """
        began = time.monotonic()
        self.stats.calls += 1
        tries = self._policy.tries if max_retry is None else max_retry
        try:
            if isinstance(tries, bool) or not isinstance(tries, int) or tries < 1:
                raise ValueError(f"max_retry must be an int of at least 1, not {tries!r}")
            # Encoded once: each try sends the same bytes and the same request_id, whatever the caller does to its
            # objects meanwhile.
            content = encode(sent := {**body(), "request_id": uuid.uuid4().hex})
            subject = _subject(sent)
        except Exception as error:  # besides BadRequest, whatever the caller's own mappings raise
            failure = Failure("bad_request", str(error) or repr(error))
            return self._give_up(route, "", failure, 0, began, failed, False)
        failures: list[Failure] = []
        done = 0
        while True:
            outcome: tuple[T] | Failure | None = self._transport.unusable()
            if outcome is None:
                outcome = await self._transport.post(route, content, timeout=self._left(began), shape=shape)
                done += 1
                self.stats.tries += 1
            if not isinstance(outcome, Failure):
                self._count(outcome[0], done, began)
                return outcome[0]
            failures.append(outcome)
            delay = await self._delay(outcome, idempotent, tries, done, began)
            if delay is None:
                failure = to_report(failures, idempotent=idempotent)
                safe = idempotent or self._transport.keeps_replies
                again = repeatable(failure, self._policy, idempotent=safe)
                return self._give_up(route, subject, failure, done, began, failed, again)
            logger.warning(
                "%s: try %d of %d failed, next in %.1f s: %s: %s",
                f"{route}{subject}",
                done,
                tries,
                delay,
                outcome.code,
                outcome.message,
            )
            await self._transport.pause(delay)

    def _count(self, result: Any, tries: int, began: float) -> None:
        self.stats.seconds += time.monotonic() - began
        self.stats.retried += tries > 1
        if isinstance(result, dict) and isinstance(result.get("info"), dict):
            self.stats.replayed += result["info"].get("replayed") is True

    async def _delay(self, failure: Failure, idempotent: bool, tries: int, done: int, began: float) -> float | None:
        """Seconds until the next try, or None to give up. An action may be sent again to a server that will not run it
        again; whether it is one is asked only where that matters."""

        def delay(idempotent: bool) -> float | None:
            elapsed = time.monotonic() - began
            return next_delay(
                failure, self._policy, idempotent=idempotent, tries=tries, done=done, elapsed=elapsed, uniform=uniform
            )

        wait = delay(idempotent)
        if wait is None and delay(True) is not None and await self._transport.server_keeps_replies():
            return delay(True)
        return wait

    def _left(self, began: float) -> float:
        """The time-out of a try that begins now."""
        if self._policy.deadline is None:
            return self.timeout
        # aiohttp takes 0 for "no limit".
        return max(0.001, min(self.timeout, self._policy.deadline - (time.monotonic() - began)))

    def _give_up(
        self,
        route: str,
        subject: str,
        failure: Failure,
        tries: int,
        began: float,
        failed: Callable[[CallFailed], T],
        retryable: bool,
    ) -> T:
        seconds = time.monotonic() - began
        logger.error(
            "%s failed (%d tries, %.1f s): %s: %s", f"{route}{subject}", tries, seconds, failure.code, failure.message
        )
        error = CallFailed(
            failure.message,
            code=failure.code,
            status=failure.status,
            retryable=retryable,
            instance_gone=failure.instance_gone,
            tries=tries,
            seconds=seconds,
        )
        self.stats.failures[error.code] += 1
        self.stats.seconds += seconds
        tell(self._on_failure, route, subject.strip(" ()"), error)
        if self._raises:
            raise error
        return failed(error)


def _subject(body: Mapping[str, Any]) -> str:
    """What a call is about, as the log names it: among hundreds of episodes one looks for the instance."""
    subjects = [f"{key} {body[key]}" for key in ("instance_id", "task_id") if body.get(key)]
    return f" ({', '.join(subjects)})" if subjects else ""
