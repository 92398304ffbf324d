"""What a world may use, as far as the kernel itself sees to it. The rest is looked after by watch.py."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from aioenv.linux import data_size, prefer_for_oom_kill

# A world over its memory limit is ended by the server, which looks every so often. What grows faster than that meets
# this one: memory that is more than the limit by so much is refused, which its code sees as a MemoryError.
_MEMORY_SLACK = 64 * 2**20


@dataclass(frozen=True)
class Confinement:
    """All in bytes but `files`, the number of open files. `memory` None is no limit."""

    memory: int | None
    files: int
    file_size: int
    answer: int


def confine(limits: Confinement) -> None:
    """In a process just born, before any env code of its own runs. Its children inherit all of it."""
    _lower(resource.RLIMIT_NOFILE, limits.files)
    _lower(resource.RLIMIT_FSIZE, limits.file_size)  # Python ignores SIGXFSZ: writing beyond raises OSError
    if limits.memory is not None:
        # Counts what is shared with the template too, so the limit goes on top of that.
        _lower(resource.RLIMIT_DATA, data_size() + limits.memory + limits.memory // 4 + _MEMORY_SLACK)
    prefer_for_oom_kill()


def _lower(kind: int, value: int) -> None:
    _, most = resource.getrlimit(kind)
    if most != resource.RLIM_INFINITY:
        value = min(value, most)
    resource.setrlimit(kind, (value, value))
