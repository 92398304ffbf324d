"""What is remembered of instances that ended: why, and the replies to their last calls."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import NoReturn

from aioenv.errors import InstanceGone, UnknownInstance
from aioenv.pool.instance import Instance
from aioenv.pool.replay import Call, Replays

# So long, in seconds, and so many at most.
GRAVE_TTL = 3600.0
GRAVES = 10_000


@dataclass
class Grave:
    ended_at: float
    cause: str
    created_by: str | None  # the request_id of its create
    released_by: str | None
    replays: Replays


class Graves:
    """By id; the oldest go first."""

    def __init__(self) -> None:
        self._graves: OrderedDict[str, Grave] = OrderedDict()

    def bury(self, instance: Instance) -> None:
        now = time.monotonic()
        instance.replays.shrink_for_end()
        self._graves[instance.id] = Grave(
            now, instance.cause, instance.request_id, instance.released_by, instance.replays
        )
        self.forget_old(now)

    def forget(self, instance_id: str) -> None:
        """Its id is used again."""
        self._graves.pop(instance_id, None)

    def forget_old(self, now: float) -> None:
        while self._graves:
            instance_id, grave = next(iter(self._graves.items()))
            if now - grave.ended_at < GRAVE_TTL and len(self._graves) <= GRAVES:
                break
            del self._graves[instance_id]

    def raise_missing(self, instance_id: str) -> NoReturn:
        """Of an id that does not live: InstanceGone, or UnknownInstance if it never did, as far as is known."""
        grave = self._graves.get(instance_id)
        if grave is not None:
            raise InstanceGone(f"instance {instance_id} is gone: {grave.cause}")
        raise UnknownInstance(f"there is no instance {instance_id}; GET /instances lists those that live")

    def call(self, instance_id: str, request_id: str | None) -> Call | None:
        """A call that it has answered."""
        grave = self._graves.get(instance_id)
        return grave.replays.find(request_id) if grave is not None and request_id is not None else None

    def created_by(self, instance_id: str, request_id: str | None) -> bool:
        """Whether this very call made it."""
        grave = self._graves.get(instance_id)
        return grave is not None and request_id is not None and grave.created_by == request_id

    def released_by(self, instance_id: str, request_id: str | None) -> bool:
        """Whether this very call released it."""
        grave = self._graves.get(instance_id)
        return grave is not None and request_id is not None and grave.released_by == request_id
