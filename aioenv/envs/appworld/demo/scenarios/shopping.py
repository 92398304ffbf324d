"""Amazon: ordering, adding up the wish list, filling the cart from a note."""

from __future__ import annotations

from datetime import datetime
from random import Random

from aioenv.envs.appworld.demo.catalog import PRODUCTS
from aioenv.envs.appworld.demo.people import CARD_NAMES, PEOPLE
from aioenv.envs.appworld.demo.scenario import (
    Check,
    Plan,
    Scenario,
    answer_is,
    keeps,
    login,
    no_answer,
    only_changes,
    only_edits,
    paged,
    reported_success,
)
from aioenv.envs.appworld.demo.world import World

# What an order touches: the company also mails a receipt, which it first writes to its own file system.
_ORDER_MODELS = (
    "amazon.Order",
    "amazon.OrderItem",
    "amazon.Product",
    "gmail.Email",
    "gmail.GlobalEmailThread",
    "gmail.UserEmailThread",
    "gmail.Attachment",
    "file_system.File",
    "file_system.Directory",
)


def _order(world: World, number: int, rng: Random) -> Plan:
    person = PEOPLE[number]
    name = rng.choice(PRODUCTS[6 * number - 6 : 6 * number])[0]
    place = ("Home", "Work", "Home")[number - 1]
    card = CARD_NAMES[number % 2]
    private = {
        "me": person.number,
        "product": world.product(name).id,
        "address": world.find("amazon.Address", user_id=person.number, name=place).id,
        "card": world.find("amazon.PaymentCard", user_id=person.number, card_name=card).id,
    }
    params = {"name": name, "quantity": number + 1, "place": place, "card": card}
    return Plan(person, datetime(2024, 4, 24 + number, 13, 25), params, private=private)


def _wishes(world: World, number: int, rng: Random) -> Plan:
    person = PEOPLE[number + 7]
    total = 0.0
    for name, _, price, _ in rng.sample(PRODUCTS, 3 + 2 * number):
        quantity = rng.randrange(1, 4)
        world.add("amazon.WishListEntry", user_id=person.number, product_id=world.product(name).id, quantity=quantity)
        total += quantity * price
    return Plan(person, datetime(2024, 5, 1 + number, 11), {"list": "wish list"}, round(total, 2))


def _from_note(world: World, number: int, rng: Random) -> Plan:
    person = PEOPLE[number + 10]
    title = ("Studio shopping", "Camping list", "New flat")[number - 1]
    wanted = rng.sample(PRODUCTS, 2 + number)
    quantities = [rng.randrange(1, 5) for _ in wanted]
    lines = [f"{quantity} x {row[0]}" for quantity, row in zip(quantities, wanted, strict=True)]
    world.note(person, title, "To buy:\n" + "\n".join(lines), ["shopping"])
    for index in range(5):
        world.note(person, f"Draft {index + 1}", "1 x something that was never needed", ["shopping"])
    old = world.product(next(row for row in PRODUCTS if row not in wanted)[0])
    world.add("amazon.WishListEntry", user_id=person.number, product_id=old.id, quantity=1)
    base = round(sum(quantity * row[2] for quantity, row in zip(quantities, wanted, strict=True)), 2)
    cart = sorted(
        [person.number, world.product(row[0]).id, quantity] for quantity, row in zip(quantities, wanted, strict=True)
    )
    return Plan(person, datetime(2024, 5, 7 + number, 17, 5), {"title": title}, base, {"cart": cart})


SCENARIOS = (
    Scenario(
        id="demo13",
        split="train",
        difficulty=2,
        apps=("amazon",),
        instruction="Order $quantity of the $name on Amazon, to my $place address, and pay with my $card card.",
        plan=_order,
        solution=login("amazon")
        + """\
products = apis.amazon.search_products(access_token=amazon, query=$name, page_limit=10)
product_id = [product["product_id"] for product in products if product["name"] == $name][0]
# --- step
apis.amazon.add_product_to_cart(access_token=amazon, product_id=product_id, quantity=$quantity, clear_cart_first=True)
addresses = apis.amazon.show_addresses(access_token=amazon)
address_id = [row["address_id"] for row in addresses if row["name"] == $place][0]
# --- step
cards = apis.amazon.show_payment_cards(access_token=amazon)
card_id = [row["payment_card_id"] for row in cards if row["card_name"] == $card][0]
# --- step
apis.amazon.place_order(access_token=amazon, payment_card_id=card_id, address_id=address_id)
# --- step
apis.supervisor.complete_task()
""",
        checks=(
            no_answer(),
            only_changes(*_ORDER_MODELS),
            Check(
                "assert that one order was placed, to the right address and with the right card.",
                "no_op_fail",
                """
                expected = [params["me"], params["address"], params["card"]]
                test.case(added(models, "amazon.Order", "user_id", "address_id", "payment_card_id"), "==", [expected])
                """,
            ),
            Check(
                "assert that exactly the wanted quantity of the product was ordered, without gift wrap.",
                "no_op_fail",
                """
                fields = ("product_id", "ordered_quantity", "gift_wrap_quantity")
                expected = [params["product"], params["quantity"], 0]
                test.case(added(models, "amazon.OrderItem", *fields), "==", [expected])
                """,
            ),
            keeps("amazon.Order", but_adds=True),
            only_edits("amazon.Product", "inventory_quantity"),
            Check(
                "assert that no mail was sent but from the shop.",
                "no_op_pass",
                """
                senders = {row[0] for row in added(models, "gmail.Email", "sender_id")}
                shop = models.end.gmail.User.find_one(email="notifications@amazon.com")
                test.case(senders - {shop.id}, "==", set())
                """,
            ),
        ),
    ),
    Scenario(
        id="demo14",
        split="dev",
        difficulty=1,
        apps=("amazon",),
        instruction="What would everything on my Amazon $list cost in dollars, in the quantities noted there, "
        "before tax and delivery?",
        plan=_wishes,
        solution=login("amazon")
        + """\
wishes = apis.amazon.show_wish_list(access_token=amazon)
# --- step
total = sum(wish["quantity"] * wish["price"] for wish in wishes)
apis.supervisor.complete_task(answer=round(total, 2))
""",
        checks=(answer_is("the sum over the wish list"), reported_success(), only_changes()),
    ),
    Scenario(
        id="demo15",
        split="test_challenge",
        difficulty=3,
        apps=("simple_note", "amazon"),
        instruction='Put everything from my note "$title" into my Amazon cart, in the quantities noted, but do not '
        "order yet. What do these items cost in dollars, before tax and delivery?",
        plan=_from_note,
        solution=login("simple_note", "amazon")
        + paged("notes", "apis.simple_note.search_notes(access_token=simple_note")
        + """\
note_id = [note["note_id"] for note in notes if note["title"] == $title][0]
content = apis.simple_note.show_note(access_token=simple_note, note_id=note_id)["content"]
wanted = [line.split(" x ", 1) for line in content.splitlines() if " x " in line]
# --- step
for quantity, name in wanted:
    products = apis.amazon.search_products(access_token=amazon, query=name, page_limit=10)
    product_id = [product["product_id"] for product in products if product["name"] == name][0]
    apis.amazon.add_product_to_cart(access_token=amazon, product_id=product_id, quantity=int(quantity))
# --- step
cost = apis.amazon.show_cart(access_token=amazon)["base_cost"]
# --- step
apis.supervisor.complete_task(answer=cost)
""",
        checks=(
            answer_is("the cost of the items before tax and delivery"),
            only_changes("amazon.CartEntry"),
            Check(
                "assert that exactly the items of the note are in the cart.",
                "no_op_fail",
                """
                entries = added(models, "amazon.CartEntry", "user_id", "product_id", "quantity")
                test.case(entries, "==", params["cart"])
                """,
            ),
            keeps("amazon.CartEntry", but_adds=True),
        ),
    ),
)
