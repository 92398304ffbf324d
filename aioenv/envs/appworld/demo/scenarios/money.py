"""Venmo and Splitwise: adding up, settling, approving."""

from __future__ import annotations

from datetime import datetime, timedelta
from random import Random

from aioenv.envs.appworld.demo.people import PEOPLE, relations
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
from aioenv.envs.appworld.demo.world import World, days_before

_REASONS = ("groceries", "concert", "petrol", "lunch", "board game", "plants", "train fare")


def _received(world: World, number: int, rng: Random) -> Plan:
    person = PEOPLE[number + 5]
    other, third = (contact for contact, _ in relations(person)[number : number + 2])
    now = datetime(2024, 4, 17 + 2 * number, 15, 40)
    amounts = [rng.randrange(100, 900) / 20 + 100 * number for _ in range(4 + 2 * number)]
    for index, amount in enumerate(amounts):
        world.venmo(other, person, amount, rng.choice(_REASONS), days_before(now, index + 1))
    for days, sender, receiver in ((5, person, other), (6, third, person), (35, other, person), (60, other, person)):
        world.venmo(sender, receiver, 11.5, rng.choice(_REASONS), days_before(now, days))
    return Plan(person, now, {"name": other.name}, round(sum(amounts), 2))


def _settle(world: World, number: int, rng: Random) -> Plan:
    person = PEOPLE[number + 8]
    other, third = (contact for contact, _ in relations(person)[number : number + 2])
    name = ("Lake house", "Ski week", "Shared van")[number - 1]
    now = datetime(2024, 4, 22, 9) + timedelta(days=number)
    for index in range(6):
        world.group(third, f"Lunch club {index + 1}", [third, person])
    group = world.group(other, name, [other, person, third])
    rent = 40.0 + 20 * number + rng.randrange(0, 40) / 4
    fuel = 10.0 + rng.randrange(0, 40) / 4
    back = 6.5 + rng.randrange(0, 20) / 4
    world.expense(group, other, [(other, rent), (person, rent), (third, rent)], "rent", days_before(now, 12))
    world.expense(group, other, [(person, fuel), (third, fuel)], "fuel", days_before(now, 10))
    world.expense(group, person, [(other, back), (person, back)], "snacks", days_before(now, 9))
    world.expense(group, third, [(person, 9.75)], "maps", days_before(now, 8))
    owed = round(rent + fuel - back, 2)
    private = {"me": person.number, "other": other.number, "group": group, "amount": owed}
    return Plan(person, now, {"name": other.name, "group": name, "note": f"{name} settled"}, private=private)


def _requests(world: World, number: int, rng: Random) -> Plan:
    person = PEOPLE[number + 2]
    relation = ("roommate", "coworker", "friend")[number - 1]
    now = datetime(2024, 5, 3 + number, 20, 15)
    approve: list[int] = []
    deny: list[int] = []
    total = 0.0
    for index, (other, kind) in enumerate(relations(person) * 2):
        amount = rng.randrange(40, 160) / 4 + number
        sent = now - timedelta(days=20 - index, minutes=index)
        request = world.venmo_request(other, person, amount, rng.choice(_REASONS), sent)
        if index % 7 == 6:
            record = world.model("venmo.PaymentRequest").by_id(request)
            record.denied_at = record.updated_at = sent + timedelta(hours=5)
            record.save()
        elif kind == relation:
            approve.append(request)
            total += amount
        else:
            deny.append(request)
    user = world.find("venmo.User", email=person.email)
    user.venmo_balance = 950.0
    user.save()
    private = {"approve": approve, "deny": deny, "me": person.number, "balance": round(950 - total, 2)}
    return Plan(person, now, {"relation": relation}, round(total, 2), private)


SCENARIOS = (
    Scenario(
        id="demo10",
        split="train",
        difficulty=2,
        apps=("venmo", "phone"),
        instruction="How much money in dollars have I received from $name on Venmo in this calendar month so far?",
        plan=_received,
        solution=login("venmo")
        + paged("friends", "apis.venmo.search_friends(access_token=venmo, query=$name", last=2)
        + """\
email = [row["email"] for row in friends if row["first_name"] + " " + row["last_name"] == $name][0]
# --- step
from datetime import datetime
today = datetime.strptime(apis.phone.get_current_date_and_time()["date"], "%A, %B %d, %Y")
first = today.strftime("%Y-%m-01")
# --- step
"""
        + paged(
            "rows_seen",
            "apis.venmo.show_transactions(access_token=venmo, user_email=email, "
            'min_created_at=first, direction="received"',
        )
        + """\
# --- step
apis.supervisor.complete_task(answer=round(sum(row["amount"] for row in rows_seen), 2))
""",
        checks=(answer_is("the sum received this month"), reported_success(), only_changes()),
    ),
    Scenario(
        id="demo11",
        split="dev",
        difficulty=3,
        apps=("splitwise", "venmo"),
        instruction='Look up what I owe $name on balance in my Splitwise group "$group". Send the money from my '
        'Venmo balance with the description "$note", and record that payment in the Splitwise group.',
        plan=_settle,
        solution=login("splitwise", "venmo")
        + paged("groups", "apis.splitwise.show_groups(access_token=splitwise")
        + """\
group_id = [group["group_id"] for group in groups if group["name"] == $group][0]
# --- step
balances = apis.splitwise.show_group_balance(access_token=splitwise, group_id=group_id, email=profile["email"])
debt = [row for row in balances[0]["source_owes_to_targets"]["breakdown"] if row["name"] == $name][0]
amount, email = round(debt["amount"], 2), debt["email"]
# --- step
apis.venmo.create_transaction(access_token=venmo, receiver_email=email, amount=amount, description=$note)
# --- step
apis.splitwise.record_payment(
    access_token=splitwise, payer_email=profile["email"], receiver_email=email, amount=amount, group_id=group_id
)
# --- step
apis.supervisor.complete_task()
""",
        checks=(
            no_answer(),
            only_changes(
                "venmo.Transaction", "venmo.User", "venmo.Notification", "splitwise.Payment", "splitwise.Notification"
            ),
            Check(
                "assert that one Venmo payment of what was owed went to that person, from the Venmo balance.",
                "no_op_fail",
                """
                fields = ("sender_id", "receiver_id", "amount", "description", "payment_card_digits")
                expected = [params["me"], params["other"], params["amount"], params["note"], None]
                test.case(added(models, "venmo.Transaction", *fields), "==", [expected])
                """,
            ),
            Check(
                "assert that the same payment was recorded once in the Splitwise group.",
                "no_op_fail",
                """
                fields = ("group_id", "payer_id", "receiver_id", "amount")
                expected = [params["group"], params["me"], params["other"], params["amount"]]
                test.case(added(models, "splitwise.Payment", *fields), "==", [expected])
                """,
            ),
            keeps("venmo.Transaction", but_adds=True),
            keeps("splitwise.Payment", but_adds=True),
            only_edits("venmo.User", "venmo_balance"),
        ),
    ),
    Scenario(
        id="demo12",
        split="test_challenge",
        difficulty=3,
        apps=("venmo", "phone"),
        instruction="Approve all pending Venmo payment requests from people who are my ${relation}s according to my "
        "phone contacts, out of my Venmo balance, and deny all other pending ones. How many dollars did I approve "
        "in total?",
        plan=_requests,
        solution=login("phone", "venmo")
        + paged("contacts", "apis.phone.search_contacts(access_token=phone, relationship=$relation")
        + """\
emails = [contact["email"] for contact in contacts]
# --- step
"""
        + paged("requests", 'apis.venmo.show_received_payment_requests(access_token=venmo, status="pending"')
        + """\
# --- step
total = 0
for request in requests:
    request_id = request["payment_request_id"]
    if request["sender"]["email"] in emails:
        apis.venmo.approve_payment_request(access_token=venmo, payment_request_id=request_id)
        total += request["amount"]
    else:
        apis.venmo.deny_payment_request(access_token=venmo, payment_request_id=request_id)
# --- step
apis.supervisor.complete_task(answer=round(total, 2))
""",
        checks=(
            answer_is("the sum of the approved requests"),
            only_changes("venmo.PaymentRequest", "venmo.Transaction", "venmo.User", "venmo.Notification"),
            Check(
                "assert that exactly the pending requests from people with that relationship were approved.",
                "no_op_fail",
                """
                changed = edited(models, "venmo.PaymentRequest")
                approved = [id_ for id_, fields in changed.items() if fields == ["approved_at"]]
                test.case(approved, "==", params["approve"])
                """,
            ),
            Check(
                "assert that exactly the other pending requests were denied.",
                "no_op_fail",
                """
                changed = edited(models, "venmo.PaymentRequest")
                denied = [id_ for id_, fields in changed.items() if fields == ["denied_at"]]
                test.case(denied, "==", params["deny"])
                """,
            ),
            only_edits("venmo.PaymentRequest", "approved_at", "denied_at"),
            only_edits("venmo.User", "venmo_balance"),
            Check(
                "assert that the approved sum was taken from the supervisor's Venmo balance.",
                "no_op_fail",
                """
                user = models.end.venmo.User.by_id(params["me"])
                test.case(round(user.venmo_balance, 2), "==", params["balance"])
                """,
            ),
        ),
    ),
)
