"""What a client has been through: counters, and the callback that hears of each failure."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aioenv.errors import CallFailed

logger = logging.getLogger("aioenv.client")

# Gets the route (`/step`), the instance's or task's id as far as there is one, and the error.
OnFailure = Callable[[str, str, CallFailed], Any]


@dataclass
class Stats:
    """Counters since the client was made. Read them at any time; they are plain numbers.

    `calls` that were made, of all methods but the probes; `tries`, the requests sent for them; `retried`, calls that
    succeeded after more than one; `replayed`, calls whose reply was that of an earlier try; `failures` by code, which
    ended in a fallback or an exception; `seconds` that all calls took together, waits included.
    """

    calls: int = 0
    tries: int = 0
    retried: int = 0
    replayed: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def fallbacks(self) -> int:
        """Calls that failed for good."""
        return self.failures.total()

    def to_dict(self) -> dict[str, Any]:
        """For a trainer's log of metrics: flat, with `failures/CODE` for each code."""
        flat = {
            "calls": self.calls,
            "tries": self.tries,
            "retried": self.retried,
            "replayed": self.replayed,
            "fallbacks": self.fallbacks,
            "seconds": self.seconds,
        }
        return {**flat, **{f"failures/{code}": number for code, number in sorted(self.failures.items())}}


def tell(callback: OnFailure | None, route: str, subject: str, error: CallFailed) -> None:
    """Call back; what that raises is logged, as it is not the call's failure."""
    if callback is None:
        return
    try:
        callback(route, subject, error)
    except Exception:
        logger.exception("on_failure raised")
