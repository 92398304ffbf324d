"""The AppWorld engine's models, pointed at one set of databases at a time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Engine:
    """Thin handle on the process-global models of AppWorld; `models["spotify"].Song` is a model class.

    The engine keeps the current databases in class attributes: there can be only one of these, and a process that
    has served a world must not use it.
    """

    def __init__(self) -> None:
        from appworld.apps import get_all_apps
        from appworld.common.utils import import_models_module

        self.apps: list[str] = get_all_apps()
        self.models: dict[str, Any] = {app: import_models_module(app) for app in self.apps}

    def open(self, name: str, base: Path | None = None) -> str:
        """Open in-memory databases, empty or copied from the .db files in `base`; returns their engine-side name.

        In memory because a save commits: on disk each would wait for the disk.
        """
        from appworld.apps.api_lib import set_local_dbs

        home = f":memory:demo-{name}"
        set_local_dbs(home, str(base) if base else home, self.apps, create=base is None)
        return home

    def save_full(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        for app in self.apps:
            self.models[app].SQLModel.db.save("full", os.fspath(folder / f"{app}.db"))

    def save_changes(self, folder: Path) -> None:
        """The changes since `open`, as the engine replays them on top of the base databases."""
        folder.mkdir(parents=True)
        for app in self.apps:
            self.models[app].SQLModel.db.save("changes", os.fspath(folder / f"{app}.jsonl"))

    def close(self) -> None:
        """Forget all databases that are open in memory."""
        from appworld.apps.model_lib import CachedDBHandler, ModelHashHandler

        CachedDBHandler.reset()
        ModelHashHandler.reset()
