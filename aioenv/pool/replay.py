"""Exactly once: the replies of an instance's calls, kept by `request_id`, so that a call asked for again is not run
again. See "Exactly once" in the protocol.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, replace

from aioenv.errors import AioenvError, Busy, InstanceConflict

# Of the latest replies so many are kept, together of so many bytes, the very last one whatever its size. The client
# of an instance asks again for its last call, or for one of a few that ran at once.
KEPT_REPLIES = 16
KEPT_BYTES = 2**20
# Of an instance that ended.
KEPT_BYTES_AFTER_END = 2**11
# Ids remembered, so that what is asked again after its reply went is refused, and not run.
KEPT_IDS = 10_000


@dataclass(slots=True)
class Reply:
    """`data` is the reply's `data` in JSON; `queued` the seconds until the call's turn came, `ran` those from then."""

    data: bytes
    queued: float = 0.0
    ran: float = 0.0
    has_info: bool = False  # as the last of its keys

    def replayed(self) -> Reply:
        """The same, marked with `info.replayed` where it has an `info`."""
        return replace(self, data=self.data[:-2] + b',"replayed":true}}') if self.has_info else self


class Call:
    """One logical call: being run, or done."""

    __slots__ = ("_done", "_outcome", "_what", "finished")

    def __init__(self, what: int) -> None:
        self.finished = False
        self._what = what  # tells calls apart that were given the same id by mistake
        # Of an error what is needed to raise it anew: itself, it would keep what its traceback refers to.
        self._outcome: Reply | tuple[type[AioenvError], str] | None = None
        self._done: asyncio.Event | None = None  # made for the first who waits

    @property
    def size(self) -> int:
        if self._outcome is None:
            return 0
        return len(self._outcome.data if isinstance(self._outcome, Reply) else self._outcome[1])

    def finish(self, outcome: Reply | AioenvError) -> None:
        self._outcome = outcome if isinstance(outcome, Reply) else (type(outcome), str(outcome))
        self.finished = True
        if self._done is not None:
            self._done.set()

    def forget_reply(self) -> None:
        self._outcome = None

    async def again(self, request_id: str, what: int) -> Reply:
        """What its run gave, or will give. Raises what that raised; InstanceConflict where it can't be told any more,
        or where this is not the same call."""
        if what != self._what:
            raise InstanceConflict(
                f"request_id {request_id!r} was used for another call on this instance: take another"
            )
        if not self.finished:
            if self._done is None:
                self._done = asyncio.Event()
            await self._done.wait()
        if self._outcome is None:
            raise InstanceConflict(
                f"the call with request_id {request_id!r} ran long ago; its reply is not kept any more, and it is not"
                " run again"
            )
        if isinstance(self._outcome, Reply):
            return self._outcome.replayed()
        kind, message = self._outcome
        raise kind(message)


class Replays:
    """All calls of an instance that had a `request_id`."""

    def __init__(self) -> None:
        self._calls: dict[str, Call] = {}
        self._kept: OrderedDict[str, Call] = OrderedDict()  # with their replies, the oldest first
        self._bytes = 0

    def find(self, request_id: str) -> Call | None:
        return self._calls.get(request_id)

    def begin(self, request_id: str, what: int) -> Call:
        call = self._calls[request_id] = Call(what)
        if len(self._calls) > KEPT_IDS:
            oldest = next(iter(self._calls))
            if self._calls[oldest].finished:
                self._forget(oldest)
                del self._calls[oldest]
        return call

    def finish(self, request_id: str, outcome: Reply | AioenvError) -> None:
        call = self._calls[request_id]
        if isinstance(outcome, Reply) and len(outcome.data) < KEPT_BYTES:
            # A copy takes its length; what orjson made keeps the kilobytes of room that it was written in.
            outcome.data = bytes(memoryview(outcome.data))
        call.finish(outcome)
        if isinstance(outcome, Busy):  # it did not run: asked again, it may
            del self._calls[request_id]
            return
        self._kept[request_id] = call
        self._bytes += call.size
        self._shrink(KEPT_BYTES, 1)

    def shrink_for_end(self) -> None:
        """The instance is gone: keep what is cheap to keep, which the reasons of its last failures are. What is asked
        again beyond that is told that it is gone."""
        self._shrink(KEPT_BYTES_AFTER_END, 0)
        self._calls = dict(self._kept)

    def _shrink(self, most: int, least: int) -> None:
        while len(self._kept) > least and (len(self._kept) > KEPT_REPLIES or self._bytes > most):
            self._forget(next(iter(self._kept)))

    def _forget(self, request_id: str) -> None:
        call = self._kept.pop(request_id, None)
        if call is not None:
            self._bytes -= call.size
            call.forget_reply()
