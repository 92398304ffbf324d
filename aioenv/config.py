"""Settings of the service: defaults, and what each means. The command line fills them in (cli.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """Seconds, unless said otherwise."""

    create_timeout: float = 120.0
    step_timeout: float = 150.0
    evaluate_timeout: float = 120.0
    max_instances: int = 1000
    max_body: int = 64 * MIB  # bytes of a request


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
    group_templates: int = 16  # worlds kept to be copied, one for each task that is being played
    group_ttl: float = 600.0  # seconds without a create after which such a world goes
    reap_interval: float = 30.0  # seconds
    stop_grace: float = 10.0  # seconds that running calls have to end when the server stops
    scratch: Path | None = None  # the folder for instances' folders; a temporary one if None
    keep_outputs: Path | None = None
    limits: Limits = field(default_factory=Limits)
    log_level: str = "info"
