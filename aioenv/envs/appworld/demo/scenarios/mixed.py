"""Tasks over several apps: from mail to tasks, from files to shared expenses, from music to mail."""

from __future__ import annotations

from datetime import datetime
from random import Random

from aioenv.envs.appworld.demo.catalog import ARTISTS
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
    paged,
)
from aioenv.envs.appworld.demo.world import World, days_before

_THINGS = (
    "pack the tent",
    "charge the torches",
    "book the ferry",
    "print the map",
    "buy oats",
    "find the whistle",
    "air the blankets",
    "ask about parking",
    "copy the keys",
)


def _mail_to_tasks(world: World, number: int, rng: Random) -> Plan:
    person = PEOPLE[number + 3]
    other = relations(person)[number][0]
    project = ("Island weekend", "School fair", "Attic")[number - 1]
    subject = f"What is left for {project.lower()}"
    now = datetime(2024, 5, 10 + number, 9, 30)
    items = rng.sample(_THINGS, 3 + number)
    older = [item for item in _THINGS if item not in items][:2]
    project_id = world.project(person, project)
    world.todo(person, project_id, "make a plan", days_before(now, 3))
    # The newest of the two mails with this subject is meant.
    for days, lines in ((9, older), (2, items)):
        body = "Hi!\n" + "\n".join(f"* {line}" for line in lines) + f"\nYours, {other.first}"
        world.mail(other, person, subject, body, days_before(now, days))
    for index in range(7):
        world.mail(other, person, f"Newsletter {index + 1}", "* nothing here", days_before(now, 0, 1, index))
    private = {"tasks": sorted([project_id, person.number, item] for item in items)}
    params = {"subject": subject, "name": other.name, "email": other.email, "project": project}
    return Plan(person, now, params, len(items), private)


def _bills(world: World, number: int, rng: Random) -> Plan:
    person = PEOPLE[number + 6]
    others = [contact for contact, _ in relations(person)[number : number + 2]]
    kind = ("electricity", "water", "internet")[number - 1]
    name = ("Alder Row", "Back house", "Third floor")[number - 1]
    year = 2022 + rng.randrange(2)
    now = datetime(2024, 5, 14 + number, 20)
    for index in range(4):
        world.group(others[0], f"Old trip {index + 1}", [others[0], person])
    group = world.group(person, name, [person, *others])
    cents = [rng.randrange(2000, 9000) for _ in range(5 + number)]
    # Divisible by three to the cent: everybody's share is exact.
    cents[-1] += -sum(cents) % 3
    for month, amount in enumerate(cents, start=1):
        world.file(person, f"bills/{kind}_{year}_{month:02d}.txt", f"{kind} bill\namount due: {amount / 100:.2f}\n")
    for month in (3, 7):
        world.file(person, f"bills/{kind}_{year - 1}_{month:02d}.txt", f"{kind} bill\namount due: 77.00\n")
        world.file(person, f"bills/gas_{year}_{month:02d}.txt", "gas bill\namount due: 55.00\n")
    total = round(sum(cents) / 100, 2)
    members = [person, *others]
    private = {
        "me": person.number,
        "group": group,
        "total": total,
        "shares": sorted([member.number, round(total / 3, 2)] for member in members),
    }
    description = f"{kind} {year}"
    params = {"kind": kind, "year": str(year), "group": name, "description": description}
    return Plan(person, now, params, private=private)


def _share_music(world: World, number: int, rng: Random) -> Plan:
    person = PEOPLE[number + 9]
    other = relations(person)[number][0]
    title = ("Songs for Saturday", "Quiet corner", "Loud kitchen")[number - 1]
    picks = rng.sample([song for _, _, songs in ARTISTS for song in songs], 4 + number)
    for index in range(6):
        world.playlist(person, f"Leftovers {index + 1}", ["Low Gravity"])
    world.playlist(person, title, picks)
    now = datetime(2024, 5, 18 + number, 18)
    params = {"title": title, "name": other.name}
    private = {"mail": [person.number, [other.number], title, "\n".join(sorted(picks))]}
    return Plan(person, now, params, private=private)


SCENARIOS = (
    Scenario(
        id="demo16",
        split="test_normal",
        difficulty=3,
        apps=("gmail", "todoist"),
        instruction='Find the latest mail with the subject "$subject" that $name ($email) sent me. For each line in '
        'it that starts with an asterisk, add a task to my Todoist project "$project", with the text after the '
        "asterisk as its title. How many tasks did you add?",
        plan=_mail_to_tasks,
        solution=login("gmail", "todoist")
        + paged("threads", "apis.gmail.show_inbox_threads(access_token=gmail, from_email=$email")
        + """\
threads = [thread for thread in threads if thread["subject"] == $subject]
latest = max(threads, key=lambda thread: thread["created_at"])
thread = apis.gmail.show_thread(access_token=gmail, email_thread_id=latest["email_thread_id"])
# --- step
items = [line[2:] for line in thread["emails"][-1]["body"].splitlines() if line.startswith("* ")]
"""
        + paged("projects", "apis.todoist.show_projects(access_token=todoist")
        + """\
project_id = [project["project_id"] for project in projects if project["name"] == $project][0]
# --- step
for item in items:
    apis.todoist.create_task(access_token=todoist, project_id=project_id, title=item)
# --- step
apis.supervisor.complete_task(answer=len(items))
""",
        checks=(
            answer_is("the number of added tasks"),
            only_changes("todoist.Task"),
            Check(
                "assert that exactly the items of the mail were added to the project.",
                "no_op_fail",
                'test.case(added(models, "todoist.Task", "project_id", "user_id", "title"), "==", params["tasks"])',
            ),
            keeps("todoist.Task", but_adds=True),
        ),
    ),
    Scenario(
        id="demo17",
        split="test_challenge",
        difficulty=3,
        apps=("file_system", "splitwise"),
        instruction="Add up the amounts of my $kind bills from $year in the folder bills of my home folder (one file "
        'per month). Then record the sum in my Splitwise group "$group" as one expense that I paid, with the '
        'description "$description", shared equally by all members of the group, me included.',
        plan=_bills,
        solution=login("file_system", "splitwise")
        + """\
paths = apis.file_system.show_directory(access_token=file_system, directory_path="~/bills/", entry_type="files")
paths = [path for path in paths if ($kind + "_" + $year + "_") in path]
# --- step
total = 0
for path in paths:
    content = apis.file_system.show_file(access_token=file_system, file_path=path)["content"]
    total += float(content.split("amount due: ")[1].split()[0])
total = round(total, 2)
# --- step
"""
        + paged("groups", "apis.splitwise.show_groups(access_token=splitwise")
        + """\
group = [group for group in groups if group["name"] == $group][0]
emails = [member["email"] for member in group["members"]]
# --- step
apis.splitwise.record_expense(
    access_token=splitwise,
    description=$description,
    paid_amount=total,
    payer_email=profile["email"],
    debtor_emails=emails,
    group_id=group["group_id"],
)
# --- step
apis.supervisor.complete_task()
""",
        checks=(
            no_answer(),
            only_changes("splitwise.Expense", "splitwise.ExpenseShare", "splitwise.Notification"),
            Check(
                "assert that one expense with the right sum, payer, group and description was recorded.",
                "no_op_fail",
                """
                fields = ("group_id", "payer_id", "amount", "description")
                expected = [params["group"], params["me"], params["total"], params["description"]]
                test.case(added(models, "splitwise.Expense", *fields), "==", [expected])
                """,
            ),
            Check(
                "assert that all members of the group owe an equal share of it.",
                "no_op_fail",
                """
                shares = added(models, "splitwise.ExpenseShare", "debtor_id", "share_amount")
                test.case(shares, "==", params["shares"])
                """,
            ),
            keeps("splitwise.Expense", but_adds=True),
            keeps("splitwise.ExpenseShare", but_adds=True),
        ),
    ),
    Scenario(
        id="demo18",
        split="train",
        difficulty=2,
        apps=("spotify", "phone", "gmail"),
        instruction='Mail the titles of all songs on my Spotify playlist "$title" to $name (the address is in my '
        "phone contacts): one title per line, in alphabetical order, nothing else in the body, and the name of the "
        "playlist as the subject.",
        plan=_share_music,
        solution=login("spotify", "phone", "gmail")
        + paged("playlists", "apis.spotify.show_playlist_library(access_token=spotify")
        + """\
playlist_id = [playlist["playlist_id"] for playlist in playlists if playlist["title"] == $title][0]
playlist = apis.spotify.show_playlist(access_token=spotify, playlist_id=playlist_id)
titles = sorted(song["title"] for song in playlist["songs"])
# --- step
"""
        + paged("contacts", "apis.phone.search_contacts(access_token=phone")
        + """\
email = [c["email"] for c in contacts if c["first_name"] + " " + c["last_name"] == $name][0]
# --- step
apis.gmail.send_email(access_token=gmail, email_addresses=[email], subject=$title, body="\\n".join(titles))
# --- step
apis.supervisor.complete_task()
""",
        checks=(
            no_answer(),
            only_changes("gmail.Email", "gmail.GlobalEmailThread", "gmail.UserEmailThread"),
            Check(
                "assert that one mail with the sorted titles was sent to that person alone.",
                "no_op_fail",
                """
                mails = added(models, "gmail.Email", "sender_id", "recipient_ids", "subject", "body")
                for mail in mails:
                    mail[3] = "\\n".join(line.strip() for line in mail[3].strip().splitlines())
                test.case(mails, "==", [params["mail"]])
                """,
            ),
            keeps("gmail.Email", but_adds=True),
            keeps("gmail.UserEmailThread", but_adds=True),
        ),
    ),
)
