"""Writing many rows fast, past the engine's models but with what they would have written."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aioenv.envs.appworld.demo.engine import Engine

_CHUNK = 2000


class Table:
    """One table of one database. Rows are buffered, and get their ids at once.

    Every row gets what the models keep beside the plain fields: the record hash, by the engine's own function, and
    the entry in the full-text index, if the model has one.
    """

    def __init__(self, model: Any, connection: sqlite3.Connection) -> None:
        # Every field, in a fixed order; those that a caller doesn't pass hold the model's default.
        skip = ("_db_home_path", "record_hash", "id")
        names = model.properties(skip=skip)
        self._defaults = {name: model.__fields__[name].get_default() for name in names}
        self._json = {name for name in names if "JSON" in str(model.__table__.columns[name].type)}
        self._hash = model.set_record_hash
        self._properties = model.properties
        self._connection = connection
        table = model.table_name
        columns = ", ".join(f'"{name}"' for name in ("id", "record_hash", *names))
        places = ", ".join("?" * (len(names) + 2))
        self._insert = f'INSERT INTO "{table}" ({columns}) VALUES ({places})'
        self._index = f"INSERT INTO {table}_fts (id, saved_search_text) VALUES (?, ?)" if model.searchable() else ""
        self._rows: list[tuple[Any, ...]] = []
        self._texts: list[tuple[int, str]] = []
        (last,) = connection.execute(f'SELECT COALESCE(MAX(id), 0) FROM "{table}"').fetchone()
        self._last = int(last)
        self.added = 0

    @property
    def next_id(self) -> int:
        return self._last + 1

    def add(self, search_text: str = "", /, **fields: Any) -> int:
        """Add a row; returns its id. `search_text` is what the model would compute as its search text."""
        values = {**self._defaults, **fields}
        if len(values) != len(self._defaults):
            raise TypeError(f"no such fields: {sorted(set(fields) - set(self._defaults))} ({self._insert})")
        # A stand-in for a model instance, with just what the hash function looks at: instances cost ten times more.
        stand_in = SimpleNamespace(properties=self._properties, **values)
        self._hash(stand_in)
        self._last += 1
        self.added += 1
        stored = [self._stored(name, value) for name, value in values.items()]
        self._rows.append((self._last, stand_in.record_hash, *stored))
        if self._index:
            self._texts.append((self._last, " ".join(search_text.lower().split())))
        if len(self._rows) >= _CHUNK:
            self.flush()
        return self._last

    def flush(self) -> None:
        self._connection.executemany(self._insert, self._rows)
        self._rows.clear()
        if self._texts:
            self._connection.executemany(self._index, self._texts)
            self._texts.clear()

    def _stored(self, name: str, value: Any) -> Any:
        if name in self._json:
            return json.dumps(value)
        if isinstance(value, datetime):
            return value.strftime("%Y-%m-%d %H:%M:%S.%f")
        return value


class Tables:
    """The tables of one app, by model name."""

    def __init__(self, engine: Engine, app: str, connection: sqlite3.Connection) -> None:
        self._models = engine.models[app]
        self._connection = connection
        self._tables: dict[str, Table] = {}

    def __getitem__(self, name: str) -> Table:
        if name not in self._tables:
            self._tables[name] = Table(getattr(self._models, name), self._connection)
        return self._tables[name]

    @property
    def added(self) -> int:
        return sum(table.added for table in self._tables.values())

    def flush(self) -> None:
        for table in self._tables.values():
            table.flush()


@contextmanager
def bulk_tables(engine: Engine, base: Path, app: str) -> Iterator[Tables]:
    """Write to one base database in one transaction. Not crash-safe: a crash costs the whole build anyway."""
    connection = sqlite3.connect(base / f"{app}.db")
    try:
        connection.execute("PRAGMA journal_mode=OFF")
        connection.execute("PRAGMA synchronous=OFF")
        tables = Tables(engine, app, connection)
        yield tables
        tables.flush()
        connection.commit()
    finally:
        connection.close()
