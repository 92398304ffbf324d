"""Phone: counting messages, switching alarms off, and texting the people named in a note."""

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
from aioenv.envs.appworld.demo.world import EPOCH, World, days_before

_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_WORDS = ("ok", "on my way", "did you see this?", "nearly there", "thank you!", "later then", "ha!", "see you at six")


def _yesterday(world: World, number: int, rng: Random) -> Plan:
    person = PEOPLE[number + 1]
    other = relations(person)[number][0]
    now = datetime(2024, 3, 3 + 4 * number, 16, 30)
    count = 3 * number + rng.randrange(2, 5)
    # In the order of time: ids and dates of messages agree, as they do in life.
    world.text(other, person, "see you next week", days_before(now, 2, 22))
    for minute in range(count):
        world.text(other, person, rng.choice(_WORDS), days_before(now, 1, 9 + minute % 3, 3 * minute))
        if minute % 2:
            world.text(person, other, rng.choice(_WORDS), days_before(now, 1, 13, minute))
    world.text(other, person, "good morning", days_before(now, 0, 7))
    return Plan(person, now, {"name": other.name}, count)


def _alarms(world: World, number: int, rng: Random) -> Plan:
    person = PEOPLE[number + 4]
    day = ("saturday", "monday", "friday")[number - 1]
    off: list[int] = []
    for index in range(6 + number):
        days = rng.sample(_DAYS, 3)
        if index < 2 + number:
            days = [*days[:2], day]
        elif index == 2 + number:
            # One alarm that stays on: "switch everything off" is no solution.
            days = [other for other in days if other != day]
        days = sorted(set(days), key=_DAYS.index)
        enabled = index != 1
        alarm = world.add(
            "phone.Alarm",
            user_id=person.number,
            time=f"{6 + index:02d}:{rng.randrange(0, 60, 5):02d}",
            repeat_days=days,
            label=f"alarm {index + 1}",
            enabled=enabled,
            snooze_minutes=5,
            vibration=True,
            created_at=EPOCH,
        )
        if enabled and day in days:
            off.append(alarm.id)
    return Plan(person, datetime(2024, 3, 5 + number, 22, 10), {"day": day}, private={"alarms": off})


def _invite(world: World, number: int, rng: Random) -> Plan:
    person = PEOPLE[number + 7]
    title = ("Boat trip", "Board games", "Choir practice")[number - 1]
    message = ("Harbour at ten, bring a hat!", "Games at my place, eight sharp.", "We sing on Thursday.")[number - 1]
    guests = rng.sample([other for other, _ in relations(person)], 2 + number)
    lines = [f"- {guest.name}" for guest in guests]
    world.note(person, title, "Coming along:\n" + "\n".join(lines), ["people"])
    for index in range(6):
        world.note(person, f"Scrap {index + 1}", "nothing to see here")
    texts = sorted([person.number, guest.number, message] for guest in guests)
    params = {"title": title, "message": message}
    return Plan(
        person, datetime(2024, 3, 10 + number, 12) + timedelta(minutes=number), params, private={"texts": texts}
    )


_CONTACTS = paged("contacts", "apis.phone.search_contacts(access_token=phone")

SCENARIOS = (
    Scenario(
        id="demo04",
        split="test_normal",
        difficulty=2,
        apps=("phone",),
        instruction="How many text messages did $name send me yesterday?",
        plan=_yesterday,
        solution=login("phone")
        + _CONTACTS
        + """\
number = [c["phone_number"] for c in contacts if c["first_name"] + " " + c["last_name"] == $name][0]
# --- step
from datetime import datetime, timedelta
today = datetime.strptime(apis.phone.get_current_date_and_time()["date"], "%A, %B %d, %Y")
day = (today - timedelta(days=1)).strftime("%Y-%m-%d")
# --- step
"""
        + paged(
            "messages",
            "apis.phone.show_text_message_window(access_token=phone, phone_number=number, "
            'min_datetime=day + "|00:00:00", max_datetime=day + "|23:59:59"',
        )
        + """\
count = sum(1 for message in messages if message["sender"]["phone_number"] == number)
# --- step
apis.supervisor.complete_task(answer=count)
""",
        checks=(answer_is("the number of messages from yesterday"), reported_success(), only_changes()),
    ),
    Scenario(
        id="demo05",
        split="train",
        difficulty=1,
        apps=("phone",),
        instruction="Switch off every alarm on my phone that rings on a $day. Leave its other settings as they are.",
        plan=_alarms,
        solution=login("phone")
        + paged("alarms", "apis.phone.show_alarms(access_token=phone")
        + """\
# --- step
for alarm in alarms:
    if alarm["enabled"] and $day in (alarm["repeat_days"] or []):
        apis.phone.update_alarm(access_token=phone, alarm_id=alarm["alarm_id"], enabled=False)
# --- step
apis.supervisor.complete_task()
""",
        checks=(
            no_answer(),
            only_changes("phone.Alarm"),
            only_edits("phone.Alarm", "enabled"),
            Check(
                "assert that exactly the alarms that rang on that day were edited, and that they are off now.",
                "no_op_fail",
                """
                test.case(list(edited(models, "phone.Alarm")), "==", params["alarms"])
                alarms = models.end.phone.Alarm.by_ids(params["alarms"])
                test.case({alarm.enabled for alarm in alarms}, "==", {False})
                """,
            ),
        ),
    ),
    Scenario(
        id="demo06",
        split="train",
        difficulty=2,
        apps=("simple_note", "phone"),
        instruction='My note "$title" names a few people. Send each of them this text message: $message',
        plan=_invite,
        solution=login("simple_note", "phone")
        + paged("notes", "apis.simple_note.search_notes(access_token=simple_note")
        + """\
note_id = [note["note_id"] for note in notes if note["title"] == $title][0]
content = apis.simple_note.show_note(access_token=simple_note, note_id=note_id)["content"]
names = [line[2:] for line in content.splitlines() if line.startswith("- ")]
# --- step
"""
        + _CONTACTS
        + """\
numbers = {c["first_name"] + " " + c["last_name"]: c["phone_number"] for c in contacts}
# --- step
for name in names:
    apis.phone.send_text_message(access_token=phone, phone_number=numbers[name], message=$message)
# --- step
apis.supervisor.complete_task()
""",
        checks=(
            no_answer(),
            only_changes("phone.GlobalTextMessage", "phone.UserTextMessage"),
            Check(
                "assert that each person in the note was sent the message once, and nobody else was sent any.",
                "no_op_fail",
                """
                sent = added(models, "phone.GlobalTextMessage", "sender_id", "receiver_id", "message")
                test.case(sent, "==", params["texts"])
                """,
            ),
            keeps("phone.GlobalTextMessage", but_adds=True),
            keeps("phone.UserTextMessage", but_adds=True),
        ),
    ),
)
