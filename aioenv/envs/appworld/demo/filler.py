"""Optional filler: strangers with their mails, orders and payments, to bring the databases to realistic size.

No task is affected. Strangers own everything here and share nothing with the people of people.py; their words come
from a vocabulary of made-up syllables, so that no search for a real title, name or product matches one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from random import Random

from aioenv.envs.appworld.demo import filler_apps
from aioenv.envs.appworld.demo.bulk import Tables, bulk_tables
from aioenv.envs.appworld.demo.engine import Engine
from aioenv.envs.appworld.demo.world import EPOCH


@dataclass
class Stranger:
    number: int
    first: str
    last: str

    @property
    def name(self) -> str:
        return f"{self.first} {self.last}"

    @property
    def email(self) -> str:
        return f"{self.first}.{self.last}{self.number}@example.net".lower()

    @property
    def phone(self) -> str:
        return f"777{self.number:07d}"


class Crowd:
    """The strangers, and the source of everything random about them."""

    def __init__(self, rng: Random, size: int) -> None:
        self.rng = rng
        syllables = [a + b for a in ("zo", "vra", "qui", "xe", "plu", "dwo", "ghy", "ska") for b in "bdfgklmnprtvz"]
        self.words = sorted({rng.choice(syllables) + rng.choice(syllables) for _ in range(900)})
        self.people = [
            Stranger(number, rng.choice(self.words).title(), rng.choice(self.words).title())
            for number in range(1, size + 1)
        ]
        self.ids: dict[int, int] = {}
        """User id by a stranger's number, in the app that is being filled."""

    def text(self, low: int, high: int) -> str:
        return " ".join(self.rng.choices(self.words, k=self.rng.randint(low, high)))

    def when(self) -> datetime:
        return EPOCH - timedelta(minutes=self.rng.randrange(60, 500_000))

    def one(self) -> Stranger:
        return self.rng.choice(self.people)

    def some(self, count: int) -> list[Stranger]:
        return self.rng.sample(self.people, count)

    def user_id(self, stranger: Stranger) -> int:
        return self.ids[stranger.number]


# Share of the rows per app: mail and messages make up most of a real user base.
_SHARES: tuple[tuple[str, float, Callable[[Tables, Crowd, int], None]], ...] = (
    ("gmail", 0.2, filler_apps.gmail),
    ("phone", 0.16, filler_apps.phone),
    ("amazon", 0.16, filler_apps.amazon),
    ("spotify", 0.2, filler_apps.spotify),
    ("venmo", 0.10, filler_apps.venmo),
    ("splitwise", 0.06, filler_apps.splitwise),
    ("todoist", 0.05, filler_apps.todoist),
    ("file_system", 0.04, filler_apps.file_system),
    ("simple_note", 0.03, filler_apps.simple_note),
)


def add_filler(engine: Engine, base: Path, rows: int, seed: int) -> int:
    """Add about `rows` rows in total to the databases in `base`; returns how many it added."""
    if rows <= 0:
        return 0
    crowd = Crowd(Random(f"filler {seed}"), size=min(max(8, rows // 400), 2000))
    added = 0
    for app, share, fill in _SHARES:
        with bulk_tables(engine, base, app) as tables:
            _users(tables, crowd, app)
            fill(tables, crowd, max(int(rows * share), tables.added + 20))
            added += tables.added
    return added


def _users(tables: Tables, crowd: Crowd, app: str) -> None:
    crowd.ids = {}
    for stranger in crowd.people:
        fields = {"first_name": stranger.first, "last_name": stranger.last, "password": f"stranger-{stranger.number}"}
        if app == "phone":
            fields["phone_number"] = stranger.phone
        else:
            fields["email"] = stranger.email
        text = f"{stranger.name} {stranger.email}"
        crowd.ids[stranger.number] = tables["User"].add(text, **fields)
