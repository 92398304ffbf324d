"""Room for instances: so many at once, and a bounded line of creates that wait for it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from aioenv.errors import AtCapacity, Busy

# Seconds from hanging up to leaving the line.
_LOOK_INTERVAL = 0.5


class Slots:
    """`limit` slots, handed to those who wait in the order they came. For one event loop."""

    def __init__(self, limit: int, line: int, patience: float) -> None:
        """At most `line` may wait, each for at most `patience` seconds."""
        self.limit = limit
        self.taken = 0
        self._line = line
        self._patience = patience
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def refuse_if_full(self) -> None:
        """Raises AtCapacity where neither a slot nor a place in the line is free."""
        if self.taken >= self.limit and len(self._waiting) >= self._line:
            raise AtCapacity(
                f"{self.limit} instances live here, which is the limit, and {len(self._waiting)} creates wait for one"
                " to end; release some, or raise --max-instances"
            )

    async def take(self, hung_up: Callable[[], bool]) -> None:
        """Wait for a slot, as long as somebody waits for the outcome. Raises AtCapacity, or what `close` was given."""
        if self.taken < self.limit and not self._waiting:
            self.taken += 1
            return
        self.refuse_if_full()
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        end = loop.time() + self._patience
        try:
            while not turn.done():
                await asyncio.wait([turn], timeout=min(_LOOK_INTERVAL, max(0.0, end - loop.time())))
                if turn.done():
                    break
                if hung_up():
                    raise AtCapacity("the client hung up while it waited for an instance to end")
                if loop.time() >= end:
                    raise AtCapacity(
                        f"{self.limit} instances live here, which is the limit, and none ended within"
                        f" {self._patience:g} s; release some, or raise --max-instances",
                        retry_after=1,
                    )
            turn.result()
        except BaseException:
            if turn.done() and turn.exception() is None:
                self.give_back()
            elif not turn.done():
                self._waiting.remove(turn)
            raise

    def give_back(self) -> None:
        """To the one who has waited longest."""
        self.taken -= 1
        while self._waiting and self.taken < self.limit:
            self.taken += 1
            self._waiting.popleft().set_result(None)

    def close(self, error: Busy) -> None:
        """Turn away all who wait."""
        while self._waiting:
            self._waiting.popleft().set_exception(error)
