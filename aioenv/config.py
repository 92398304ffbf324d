"""Settings of the service: defaults, and what each means. The command line fills them in (cli.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from aioenv import linux

MIB = 2**20

# What a world is counted with when the number of instances is not set: most of the time it waits for its model, and
# an AppWorld world takes 10 to 30 MiB.
_INSTANCES_PER_CORE = 256
_MEMORY_PER_INSTANCE = 32 * MIB


def room_for_instances() -> int:
    """How many instances this machine should hold, by its cores and the memory that is free now."""
    by_memory = linux.available_memory() * 3 // 4 // _MEMORY_PER_INSTANCE
    return max(1, min(int(linux.cores() * _INSTANCES_PER_CORE), by_memory))


@dataclass(frozen=True)
class Limits:
    """Seconds and bytes, unless said otherwise."""

    create_timeout: float = 120.0
    step_timeout: float = 150.0
    evaluate_timeout: float = 120.0
    max_instances: int = field(default_factory=room_for_instances)
    create_queue: int = 1000  # creates that may wait for an instance to end
    queue_timeout: float = 60.0  # each for so long
    max_body: int = 64 * MIB  # of a request
    # Of one world, its processes together:
    max_answer: int = 64 * MIB
    memory: int | None = None  # its own, beyond what it shares with others
    processes: int = 64
    open_files: int = 1024  # of each process
    disk: int = 1024 * MIB


@dataclass(frozen=True)
class Settings:
    """Everything that `serve` can be told. `envs[0]` serves requests that name none."""

    envs: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8080
    env_dir: Path | None = None
    env_file: str | None = None
    env_options: dict[str, str] = field(default_factory=dict)  # handed to `BaseEnv.prepare`
    idle_ttl: float = 3600.0  # seconds without a call after which an instance is released
    max_lifetime: float | None = None  # seconds after which it is, as soon as no call runs
    group_templates: int = 16  # worlds kept to be copied, one for each task that is being played
    group_ttl: float = 600.0  # seconds without a create after which such a world goes
    checkpoint_ttl: float = 3600.0  # seconds that a checkpoint lives after it was made or last restored
    reap_interval: float = 30.0  # seconds
    stop_grace: float = 10.0  # seconds that running calls have to end when the server stops
    scratch: Path | None = None  # the folder for instances' folders; a temporary one if None
    scratch_limit: int | None = None  # bytes of all folders in it together; None: 90 % of what is free at the start
    keep_outputs: Path | None = None
    limits: Limits = field(default_factory=Limits)
    log_level: str = "info"
