"""The life of an instance. Every change goes through `Lifecycle.to`; an illegal one raises, with the history."""

from __future__ import annotations

import time
from collections import deque
from enum import StrEnum


class State(StrEnum):
    STARTING = "starting"  # its world is being forked and asked for its first observation
    READY = "ready"  # idle: may be called, may be reaped
    BUSY = "busy"  # a call is running
    CLOSING = "closing"  # released, reaped or shut down: takes no more calls
    ENDED = "ended"  # its process is gone; `cause` says why


ALLOWED = {
    State.STARTING: {State.READY, State.CLOSING, State.ENDED},
    State.READY: {State.BUSY, State.CLOSING, State.ENDED},
    State.BUSY: {State.READY, State.CLOSING, State.ENDED},
    State.CLOSING: {State.ENDED},
    State.ENDED: set(),
}


class IllegalChange(Exception):
    """A bug of ours: the message has the instance's history."""


class Lifecycle:
    """Where an instance is in its life, why it ends, and how it came there."""

    def __init__(self, instance_id: str) -> None:
        self.instance_id = instance_id
        self.state = State.STARTING
        self.cause: str | None = None
        self._born = time.monotonic()
        # The latest changes, as (seconds since it began to start, state).
        self.history: deque[tuple[float, State]] = deque([(0.0, State.STARTING)], maxlen=20)

    def to(self, state: State, cause: str | None = None) -> None:
        """Change. `cause` says why it closes or ended; the first one given is kept."""
        if state not in ALLOWED[self.state]:
            raise IllegalChange(
                f"instance {self.instance_id} can't go from {self.state.value} to {state.value}: {self.told}"
            )
        self.state = state
        self.cause = self.cause or cause
        self.history.append((time.monotonic() - self._born, state))

    @property
    def told(self) -> str:
        """The history, for people."""
        return ", ".join(f"{state.value} at {seconds:.3f} s" for seconds, state in self.history)

    @property
    def takes_calls(self) -> bool:
        return self.state in (State.READY, State.BUSY)
