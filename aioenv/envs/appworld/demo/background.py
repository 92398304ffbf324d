"""The base databases: everyone's accounts and contacts, the catalogues, and everyday clutter."""

from __future__ import annotations

from datetime import timedelta
from random import Random
from typing import Any

from aioenv.envs.appworld.demo import catalog
from aioenv.envs.appworld.demo.people import ACCOUNTS, CARD_NAMES, PEOPLE, Person, relations
from aioenv.envs.appworld.demo.world import EPOCH, World, days_before


def populate(world: World, rng: Random) -> None:
    """Fill empty databases. Scenarios add to this; what they count or sum up they add themselves."""
    for person in PEOPLE:
        _accounts(world, person, rng)
    _companies()
    _music(world, rng)
    _shop(world, rng)
    for person in PEOPLE:
        _clutter(world, person, rng)


def _accounts(world: World, person: Person, rng: Random) -> None:
    names = {"first_name": person.first, "last_name": person.last}
    world.add(
        "admin.MainUser",
        email=person.email,
        phone_number=person.phone,
        birthday=person.birthday,
        sex=person.sex,
        **names,
    )
    for app in ACCOUNTS:
        fields: dict[str, Any] = {"password": person.password(app), "created_at": EPOCH, "last_logged_in": EPOCH}
        if app == "phone":
            fields["phone_number"] = person.phone
        else:
            fields["email"] = person.email
            fields["verified"] = True
        if app == "venmo":
            fields["venmo_balance"] = 400.0 + rng.randrange(100, 900) / 4
        world.add(f"{app}.User", **names, **fields)
    owner = {"main_user_id": person.number}
    passwords = [{"account_name": app, "password": person.password(app), **owner} for app in ACCOUNTS]
    world.add_all("admin.AccountPassword", passwords)
    for name in ("Home", "Work"):
        address = person.address(name)
        place = world.add("admin.GlobalAddress", **address)
        world.add("admin.UserAddress", global_address_id=place.id, main_user_id=person.number, name=name)
        world.add("amazon.Address", user_id=person.number, name=name, **address)
    for name in CARD_NAMES:
        card = person.card(name)
        balance = 900.0 + rng.randrange(0, 400)
        world.add("admin.PaymentCard", main_user_id=person.number, balance=balance, **card)
        for app in ("amazon", "spotify", "venmo"):
            world.add(f"{app}.PaymentCard", user_id=person.number, **card)


def _companies() -> None:
    """Accounts from which the apps themselves write to people; order confirmations need one."""
    from appworld.apps.api_lib import CompanyNotifier

    for app in ACCOUNTS:
        CompanyNotifier(app.replace("_", " ")).create_accounts(skip_if_exists=True)


def _music(world: World, rng: Random) -> None:
    for name, genre, titles in catalog.ARTISTS:
        artist = world.add("spotify.Artist", name=name, genre=genre, created_at=EPOCH)
        released = EPOCH - timedelta(days=rng.randrange(200, 2000))
        fields = {"artist_ids": [artist.id], "genre": genre, "release_date": released}
        album = world.add("spotify.Album", title=f"The {titles[0]} Sessions", **fields)
        for index, title in enumerate(titles):
            in_album = {"album_id": album.id} if index < 4 else {}
            numbers = {"duration": rng.randrange(120, 420), "play_count": rng.randrange(50, 900)}
            world.add("spotify.Song", title=title, **fields, **in_album, **numbers)


def _shop(world: World, rng: Random) -> None:
    for name in ("UPS", "USPS", "FedEx"):
        world.add("amazon.Deliverer", name=name)
    sellers = {name: world.add("amazon.Seller", name=name).id for name in catalog.SELLERS}
    for name, kind, price, seller in catalog.PRODUCTS:
        world.add(
            "amazon.Product",
            name=name,
            product_type=kind,
            description=f"A {kind} by {seller}.",
            seller_id=sellers[seller],
            price=price,
            delivery_days=rng.randrange(2, 8),
            inventory_quantity=rng.randrange(30, 90),
            weight=rng.randrange(1, 40) / 10,
            length=rng.randrange(4, 30),
            width=rng.randrange(4, 20),
            height=rng.randrange(1, 15),
        )


def _clutter(world: World, person: Person, rng: Random) -> None:
    circle = relations(person)
    owner = {"user_id": person.number, "created_at": EPOCH}
    contacts = [
        {
            "first_name": other.first,
            "last_name": other.last,
            "email": other.email,
            "phone_number": other.phone,
            "relationships": [relation],
            "birthday": other.birthday,
            **owner,
        }
        for other, relation in circle
    ]
    world.add_all("phone.Contact", contacts)
    world.add_all("venmo.Friendship", [{"friend_id": other.number, **owner} for other, _ in circle])
    others = [other for other, _ in circle]
    # One song of each of six artists: no artist stands out before a scenario makes one.
    songs = [rng.choice(titles) for _, _, titles in rng.sample(catalog.ARTISTS, 6)]
    world.add_all("spotify.UserLibrarySong", [{"song_id": world.song_id(title), **owner} for title in songs])
    for title in songs[:2]:
        world.add("spotify.SongLike", user_id=person.number, song_id=world.song_id(title), liked_at=EPOCH)
    world.playlist(person, f"{person.first}'s week", songs[:3])
    world.playlist(person, f"{person.first} at the party", songs[3:], public=True)
    world.note(person, "Wifi at home", f"network: alder-{person.number}\nask me for the key", ["home"])
    world.note(person, "Gift ideas", "a kite\nsomething knitted\ntickets for two", ["ideas"])
    world.file(person, "readme.txt", f"Home folder of {person.name}.")
    world.file(person, "downloads/manual.pdf", "binary:manual")
    world.project(person, "Inbox", inbox=True)
    for number, other in enumerate(rng.sample(others, 2)):
        when = days_before(EPOCH, rng.randrange(3, 40))
        world.text(person, other, rng.choice(("Are you home?", "Call me when you can.", "Found your scarf!")), when)
        world.venmo(other, person, rng.randrange(8, 120) / 4, rng.choice(("coffee", "tickets", "parcel")), when)
        world.mail(other, person, f"Hello again ({number + 1})", "Just saying hello.", when)
