"""The people of the demo world. All are invented; phone numbers and mail addresses are fictional ones."""

from __future__ import annotations

from dataclasses import dataclass

ACCOUNTS = ("amazon", "file_system", "gmail", "phone", "simple_note", "splitwise", "spotify", "todoist", "venmo")
CARD_NAMES = ("Visa", "Chase")
MAIL_DOMAIN = "example.com"


@dataclass(frozen=True)
class Person:
    """`number` counts from 1 and is this person's user id in every app of the base databases."""

    number: int
    first: str
    last: str
    sex: str
    birthday: str

    @property
    def name(self) -> str:
        return f"{self.first} {self.last}"

    @property
    def email(self) -> str:
        return f"{self.first}.{self.last}@{MAIL_DOMAIN}".lower()

    @property
    def phone(self) -> str:
        return f"55501{self.number * 7919 % 100000:05d}"

    def password(self, app: str) -> str:
        return f"{self.first[::-1].lower()}-{app.replace('_', '')}-{self.number * 37 % 90 + 10}"

    def address(self, name: str) -> dict[str, str | int]:
        """The "Home" or "Work" address, with the field names that every app uses."""
        home, work = f"{self.number * 13 % 80 + 2} Alder Row", f"{self.number % 4 * 100 + 7} Quayside"
        return {
            "street_address": home if name == "Home" else work,
            "city": "Port Lumen",
            "state": "Westmark",
            "country": "Norlandia",
            "zip_code": 41000 + self.number,
        }

    def card(self, name: str) -> dict[str, str | int]:
        """A payment card, with the field names that every app uses."""
        return {
            "card_name": name,
            "owner_name": self.name,
            "card_number": 4000_0000_0000_0000 + self.number * 1_000_037 + CARD_NAMES.index(name) * 500_000_000_017,
            "expiry_year": 2031,
            "expiry_month": self.number % 12 + 1,
            "cvv_number": 100 + self.number * 53 % 900,
        }


_ROWS = (
    ("Ottoline", "Fairweather", "female", "1988-04-02"),
    ("Bram", "Okonjo", "male", "1991-11-19"),
    ("Saskia", "Villeneuve", "female", "1994-07-30"),
    ("Tobiah", "Lindgren", "male", "1986-01-14"),
    ("Imogen", "Castellan", "female", "1990-09-08"),
    ("Farid", "Haldane", "male", "1993-03-27"),
    ("Wren", "Abernathy", "female", "1989-12-05"),
    ("Casimir", "Doyle", "male", "1992-06-21"),
    ("Noor", "Pemberton", "female", "1995-02-11"),
    ("Ezekiel", "Marchetti", "male", "1987-08-16"),
    ("Linnea", "Strand", "female", "1996-05-03"),
    ("Matthis", "Oyelaran", "male", "1990-10-25"),
    ("Perpetua", "Ghent", "female", "1985-03-09"),
    ("Alaric", "Bonneville", "male", "1994-12-28"),
)
PEOPLE = tuple(Person(number, *row) for number, row in enumerate(_ROWS, start=1))

_HOUSEHOLDS = ((1, 2, 3), (4, 5, 6), (7, 8, 9), (10, 11, 12), (13, 14))


def relations(person: Person) -> list[tuple[Person, str]]:
    """Everyone in this person's contact list, with the one relationship noted there; the relation is symmetric."""
    found: list[tuple[Person, str]] = []
    home = next(group for group in _HOUSEHOLDS if person.number in group)
    for other in PEOPLE:
        distance = (other.number - person.number) % len(PEOPLE)
        if other == person:
            continue
        if other.number in home:
            found.append((other, "roommate"))
        elif other.number % 4 == person.number % 4:
            found.append((other, "coworker"))
        elif distance in (5, 7, 9):
            found.append((other, "friend"))
    return found
