"""What to do after a try that failed: pure decisions, no I/O, no clock.

Codes that the client itself gives (all others are the server's, see the README):

code               meaning                                                     the server ran the call
connection_failed  no connection: refused, no such host, connect time-out      no
reply_lost         the connection ended before a whole reply was here          unknown
timeout            no whole reply within the time-out or the deadline          unknown
http_error         status 3xx to 5xx without the protocol's error object       unknown
bad_reply          another status, but not what the protocol says              most likely
bad_request        the arguments can't be sent (wrong type, no JSON form)      no, nothing was sent
client_closed      the client was closed, or belongs to another event loop     no, or unknown while in flight
client_bug         an exception that nobody foresaw; the log has its traceback  unknown
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Failure:
    """Why a try failed. `retryable`: the same request may succeed later, if it is safe to send it again.

    `never_ran` is a proof, not a guess: no connection came about, or the server itself said that it took no call.
    `retry_after` is in seconds, None where the reply didn't say.
    """

    code: str
    message: str
    status: int | None = None
    retryable: bool = False
    instance_gone: bool = False
    never_ran: bool = False
    retry_after: float | None = None


@dataclass(frozen=True)
class Policy:
    """How a client retries. All times in seconds; `deadline` counts from the start of a call, over all its tries."""

    tries: int = 3
    min_backoff: float = 3.0
    max_backoff: float = 10.0
    max_retry_after: float = 60.0
    deadline: float | None = None
    retry_unsafe: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.tries, bool) or not isinstance(self.tries, int) or self.tries < 1:
            raise ValueError(f"tries must be an int of at least 1, not {self.tries!r}")
        if not 0 <= self.min_backoff <= self.max_backoff:
            raise ValueError(f"need 0 <= min_backoff <= max_backoff, not {self.min_backoff!r}, {self.max_backoff!r}")
        if self.max_retry_after < 0:
            raise ValueError(f"max_retry_after must be at least 0, not {self.max_retry_after!r}")
        if self.deadline is not None and not self.deadline > 0:
            raise ValueError(f"deadline must be over 0 or None, not {self.deadline!r}")


Uniform = Callable[[float, float], float]  # random.uniform's signature


def repeatable(failure: Failure, policy: Policy, *, idempotent: bool) -> bool:
    """Whether the same request may be sent again without a risk of running an action twice."""
    if not failure.retryable or (failure.status is not None and 400 <= failure.status < 500):
        return False
    return idempotent or failure.never_ran or policy.retry_unsafe


def next_delay(
    failure: Failure, policy: Policy, *, idempotent: bool, tries: int, done: int, elapsed: float, uniform: Uniform
) -> float | None:
    """Seconds to wait before the next try, or None to give up.

    `done` of at most `tries` tries were made; `elapsed` seconds went by since the call began. The delay is drawn from
    [min_backoff, min_backoff * 2**done], the upper end at most max_backoff. A Retry-After is waited out (up to
    max_retry_after) and jittered on top, lest all clients that were turned away come back at once. A wait that would
    pass the deadline isn't begun.
    """
    if done >= tries or not repeatable(failure, policy, idempotent=idempotent):
        return None
    if failure.retry_after is not None:
        delay = min(failure.retry_after, policy.max_retry_after) + uniform(0.0, policy.min_backoff)
    else:
        delay = uniform(policy.min_backoff, min(policy.max_backoff, policy.min_backoff * 2.0 ** min(done, 30)))
    if policy.deadline is not None and elapsed + delay >= policy.deadline:
        return None
    return delay


def to_report(failures: Sequence[Failure], *, idempotent: bool) -> Failure:
    """The failure that the caller is told, out of those of all tries (at least one), in their order.

    It is the last, except where that one says "never ran" of an action that an earlier try may have run: then it is
    that earlier one, whose outcome is unknown.
    """
    last = failures[-1]
    if not idempotent and last.never_ran:
        unknown = [failure for failure in failures if not failure.never_ran]
        return unknown[-1] if unknown else last
    return last
