"""What strangers keep in each app; every function adds units until the app has `goal` rows of filler.

The counters and averages that the engine keeps on a row (likes, ratings) agree with the rows they count.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from aioenv.envs.appworld.demo.bulk import Tables
from aioenv.envs.appworld.demo.world import EPOCH

if TYPE_CHECKING:
    from aioenv.envs.appworld.demo.filler import Crowd


def gmail(tables: Tables, crowd: Crowd, goal: int) -> None:
    while tables.added < goal:
        sender, receiver = crowd.some(2)
        subject, body, at = crowd.text(1, 3), crowd.text(3, 12), crowd.when()
        ids = {"sender_id": crowd.user_id(sender), "recipient_ids": [crowd.user_id(receiver)]}
        email = tables["Email"].add(subject=subject, body=body, created_at=at, **ids)
        dates = {"created_at": at, "updated_at": at}
        whole = tables["GlobalEmailThread"].add(email_ids=[email], **dates)
        text = f"{sender.name} {sender.email} {receiver.name} {receiver.email} {subject} {body}"
        ends = {
            "global_email_thread_id": whole,
            "email_ids": [email],
            "sender_email_addresses": [sender.email],
            "sender_names": [sender.name],
            "recipient_email_addresses": [receiver.email],
            "recipient_names": [receiver.name],
            **dates,
        }
        thread = tables["UserEmailThread"]
        thread.add(text, user_id=crowd.user_id(sender), incoming=False, outgoing=True, read=True, **ends)
        thread.add(text, user_id=crowd.user_id(receiver), incoming=True, outgoing=False, read=False, **ends)


def phone(tables: Tables, crowd: Crowd, goal: int) -> None:
    while tables.added < goal:
        sender, receiver = crowd.some(2)
        message, at = crowd.text(1, 7), crowd.when()
        ids = {"sender_id": crowd.user_id(sender), "receiver_id": crowd.user_id(receiver)}
        whole = tables["GlobalTextMessage"].add(message=message, created_at=at, **ids)
        text = f"{message} {sender.name} {receiver.name}"
        for person in (sender, receiver):
            fields = {"global_text_message_id": whole, "user_id": crowd.user_id(person), "created_at": at}
            tables["UserTextMessage"].add(text, **fields)


def amazon(tables: Tables, crowd: Crowd, goal: int) -> None:
    rng = crowd.rng
    products: list[tuple[int, str, str, float]] = []
    number = 0
    while tables.added < goal:
        # Each round: a product, reviews of it, and orders of what there is so far.
        number += 1
        # Few products for many reviews: a search by the engine loads every product there is.
        ratings = [rng.randint(1, 5) for _ in range(min(12, len(crowd.people)))]
        rating = round(sum(ratings) / len(ratings), 1)
        seller_name = f"{crowd.text(1, 1).title()} {number}"
        seller = tables["Seller"].add(seller_name, name=seller_name, rating=rating)
        name, kind, price = f"{crowd.text(2, 2).title()} {number}", crowd.text(1, 1), rng.randrange(300, 9000) / 100
        description = crowd.text(3, 8)
        product = tables["Product"].add(
            f"{name} {kind} {description} {seller_name}",
            name=name,
            product_type=kind,
            description=description,
            seller_id=seller,
            price=price,
            delivery_days=rng.randint(1, 9),
            inventory_quantity=rng.randrange(100),
            weight=1.5,
            length=8.0,
            width=6.0,
            height=4.0,
            rating=rating,
            seller_rating=rating,
        )
        products.append((product, name, kind, price))
        for person, stars in zip(crowd.some(len(ratings)), ratings, strict=True):
            title, text = crowd.text(1, 3), crowd.text(3, 10)
            words = {"title": title, "text": text, "rating": stars, "is_verified": False, "created_at": crowd.when()}
            review = {"product_id": product, "user_id": crowd.user_id(person), **words}
            tables["ProductReview"].add(f"{title} {text}", **review)
        for _ in range(2):
            # Sorted by id, as the engine lists the products of an order in its search text.
            _order(tables, crowd, sorted(rng.sample(products, min(2, len(products)))))


def _order(tables: Tables, crowd: Crowd, bought: list[tuple[int, str, str, float]]) -> None:
    at = crowd.when()
    order = tables["Order"].add(
        " ".join(f"{name} {kind}" for _, name, kind, _ in bought),
        user_id=crowd.user_id(crowd.one()),
        address_text=crowd.text(3, 5),
        payment_card_digits="0000",
        created_at=at,
        delivery_fee=5.0,
        tax=round(sum(price for _, _, _, price in bought) / 10, 2),
    )
    for product, _, _, price in bought:
        tables["OrderItem"].add(
            order_id=order,
            product_id=product,
            ordered_quantity=1,
            returned_quantity=0,
            gift_wrap_quantity=0,
            price=price,
            expected_delivery_at=at + timedelta(days=3),
            delivered_at=at + timedelta(days=2),
        )


def spotify(tables: Tables, crowd: Crowd, goal: int) -> None:
    rng = crowd.rng
    number = 0
    while tables.added < goal:
        # Each round: an artist with eight songs, people who like them, and a playlist of them.
        number += 1
        name, genre = f"{crowd.text(1, 2).title()} {number}", crowd.text(1, 1)
        artist = tables["Artist"].add(f"{name} {genre}", name=name, genre=genre)
        songs: list[int] = []
        for index in range(8):
            title = f"{crowd.text(1, 3).title()} {number}.{index}"
            fans = crowd.some(rng.randint(2, 6))
            fields = {"title": title, "artist_ids": [artist], "genre": genre, "duration": rng.randint(90, 500)}
            likes = {"like_count": len(fans), "play_count": rng.randrange(900), "release_date": crowd.when()}
            song = tables["Song"].add(f"{title} {genre} {name}", **fields, **likes)
            songs.append(song)
            for fan in fans:
                tables["SongLike"].add(user_id=crowd.user_id(fan), song_id=song, liked_at=EPOCH)
                tables["UserLibrarySong"].add(user_id=crowd.user_id(fan), song_id=song)
        title = f"{crowd.text(1, 3)} {number}"
        playlist = tables["Playlist"].add(title, title=title, user_id=crowd.user_id(crowd.one()), is_public=False)
        for song in songs:
            tables["PlaylistSong"].add(playlist_id=playlist, song_id=song)


def venmo(tables: Tables, crowd: Crowd, goal: int) -> None:
    while tables.added < goal:
        sender, receiver, fan = crowd.some(3)
        note, at = crowd.text(1, 6), crowd.when()
        transaction = tables["Transaction"].add(
            f"{note} {sender.name} {receiver.name} {sender.email} {receiver.email}",
            sender_id=crowd.user_id(sender),
            receiver_id=crowd.user_id(receiver),
            amount=crowd.rng.randrange(100, 9000) / 100,
            description=note,
            private=True,
            like_count=1,
            created_at=at,
            updated_at=at,
        )
        like = {"transaction_id": transaction, "user_id": crowd.user_id(fan), "created_at": at}
        tables["TransactionLike"].add(**like)


def splitwise(tables: Tables, crowd: Crowd, goal: int) -> None:
    number = 0
    while tables.added < goal:
        number += 1
        members = crowd.some(4)
        owner = crowd.user_id(members[0])
        fields = {"name": f"{crowd.text(1, 3)} {number}", "invitation_code": f"z{number}"}
        group = tables["Group"].add(user_id=owner, **fields)
        for member in members:
            tables["GroupMember"].add(group_id=group, user_id=crowd.user_id(member))
        # Always in a group: the engine walks through all expenses outside of groups, whosever they are.
        for _ in range(8):
            payer, debtor = crowd.rng.sample(members, 2)
            amount, what, at = crowd.rng.randrange(100, 9000) / 100, crowd.text(1, 4), crowd.when()
            ids = [crowd.user_id(payer), crowd.user_id(debtor)]
            expense = tables["Expense"].add(
                f"{what} {payer.name} {payer.email} {debtor.name} {debtor.email}",
                user_id=ids[0],
                group_id=group,
                payer_id=ids[0],
                debtor_ids=ids[1:],
                participant_ids=ids,
                description=what,
                amount=amount,
                created_at=at,
            )
            share = {"expense_id": expense, "debtor_id": ids[1], "share_amount": amount, "created_at": at}
            tables["ExpenseShare"].add(**share)


def todoist(tables: Tables, crowd: Crowd, goal: int) -> None:
    number = 0
    while tables.added < goal:
        number += 1
        owner = crowd.one()
        name, user = f"{crowd.text(1, 2)} {number}", crowd.user_id(owner)
        project = tables["Project"].add(f"{name} {owner.name} {owner.email}", user_id=user, name=name)
        tables["ProjectCollaboratorLink"].add(project_id=project, user_id=user)
        for index in range(10):
            fields = {"title": crowd.text(2, 6), "description": crowd.text(1, 6), "due_date": crowd.when()}
            ids = {"project_id": project, "user_id": user, "order_index": index}
            tables["Task"].add(**ids, **fields, priority="low", is_completed=index % 2 == 0)


def file_system(tables: Tables, crowd: Crowd, goal: int) -> None:
    number = 0
    while tables.added < goal:
        number += 1
        owner = crowd.one()
        home = f"/home/{owner.first.lower()}/"
        place = f"box{number}/"
        user = {"user_id": crowd.user_id(owner)}
        tables["Directory"].add(path=home + place, tilde_path="~/" + place, **user)
        for index in range(12):
            name = f"{place}{crowd.text(1, 1)}_{index}.txt"
            tables["File"].add(path=home + name, tilde_path="~/" + name, content=crowd.text(4, 14), **user)


def simple_note(tables: Tables, crowd: Crowd, goal: int) -> None:
    number = 0
    while tables.added < goal:
        number += 1
        title, content, at = f"{crowd.text(1, 3)} {number}", crowd.text(6, 24), crowd.when()
        fields = {"title": title, "content": content, "created_at": at, "updated_at": at}
        tables["Note"].add(f"{title} {content}", user_id=crowd.user_id(crowd.one()), **fields)
