"""Todoist, Gmail and the file system: one app each."""

from __future__ import annotations

from datetime import datetime, timedelta
from random import Random

from aioenv.envs.appworld.demo.catalog import EXTENSIONS
from aioenv.envs.appworld.demo.people import PEOPLE, relations
from aioenv.envs.appworld.demo.scenario import (
    Check,
    Plan,
    Scenario,
    login,
    no_answer,
    only_changes,
    only_edits,
    paged,
)
from aioenv.envs.appworld.demo.world import World, days_before

_CHORES = (
    "wash the windows",
    "call the plumber",
    "sort the receipts",
    "repair the bicycle",
    "order firewood",
    "water the ferns",
    "return library books",
    "clean the gutters",
    "sharpen the knives",
    "label the jars",
    "oil the hinges",
)


def _overdue(world: World, number: int, rng: Random) -> Plan:
    person = PEOPLE[number + 10]
    name = ("Household", "Allotment", "Club room")[number - 1]
    now = datetime(2024, 3, 14 + 3 * number, 10)
    project = world.project(person, name)
    for other in range(4):
        world.project(person, f"Idea box {other + 1}")
    overdue: list[int] = []
    for index, title in enumerate(rng.sample(_CHORES, 5 + 2 * number)):
        # Late and open, late but done, due today, and due later: only the first kind counts.
        kind = ("late", "done", "today", "later", "late")[(index + number) % 5]
        days = {"late": rng.randrange(1, 15), "done": rng.randrange(1, 15), "today": 0, "later": -rng.randrange(1, 9)}
        task = world.todo(person, project, title, days_before(now, days[kind], 0), done=kind == "done")
        if kind == "late":
            overdue.append(task)
    return Plan(person, now, {"name": name}, private={"tasks": overdue})


def _star(world: World, number: int, rng: Random) -> Plan:
    person = PEOPLE[number - 1]
    other, stranger = (contact for contact, _ in relations(person)[number : number + 2])
    now = datetime(2024, 4, 1 + number, 7, 50)
    star: list[int] = []
    for index in range(9 + 3 * number):
        unread = index % 2 == 0 or rng.random() < 0.3
        sender = stranger if index % 5 == 4 else other
        sent = days_before(now, 20 - index)
        thread = world.mail(sender, person, f"Minutes, part {index + 1}", "See below.", sent, read=not unread)
        if unread and sender is other:
            star.append(thread)
    return Plan(person, now, {"name": other.name, "email": other.email}, private={"threads": star})


def _tidy(world: World, number: int, rng: Random) -> Plan:
    person = PEOPLE[number + 2]
    extension = EXTENSIONS[rng.randrange(2) + 2 * (number - 1)]
    for index in range(8 + 3 * number):
        suffix = extension if index % 3 == 0 else rng.choice(EXTENSIONS)
        place = "downloads/old/" if index % 4 == 3 else "downloads/"
        world.file(person, f"{place}scan_{index + 1:02d}.{suffix}", f"binary:scan {index + 1}")
    world.file(person, f"pictures/keep_me.{extension}", "binary:keep")
    home = f"/home/{person.first.lower()}/"
    files = world.model("file_system.File").find_all(user_id=person.number)
    doomed = sorted(
        file.id for file in files if file.path.startswith(home + "downloads/") and file.path.endswith(f".{extension}")
    )
    now = datetime(2024, 4, 8, 19) + timedelta(days=number)
    return Plan(person, now, {"extension": extension}, private={"files": doomed})


SCENARIOS = (
    Scenario(
        id="demo07",
        split="train",
        difficulty=2,
        apps=("todoist", "phone"),
        instruction='Mark all tasks in my Todoist project "$name" that are overdue as completed. '
        "Those that are due today are not overdue.",
        plan=_overdue,
        solution=login("todoist")
        + paged("projects", "apis.todoist.show_projects(access_token=todoist")
        + """\
project_id = [project["project_id"] for project in projects if project["name"] == $name][0]
# --- step
from datetime import datetime
today = datetime.strptime(apis.phone.get_current_date_and_time()["date"], "%A, %B %d, %Y").strftime("%Y-%m-%d")
tasks = apis.todoist.show_tasks(access_token=todoist, project_id=project_id, is_completed=False)["no_section_tasks"]
# --- step
for task in tasks:
    if task["due_date"] and task["due_date"][:10] < today:
        apis.todoist.update_task(access_token=todoist, task_id=task["task_id"], is_completed=True)
# --- step
apis.supervisor.complete_task()
""",
        checks=(
            no_answer(),
            only_changes("todoist.Task"),
            only_edits("todoist.Task", "is_completed"),
            Check(
                "assert that exactly the overdue open tasks of the project were edited, and that they are done now.",
                "no_op_fail",
                """
                test.case(list(edited(models, "todoist.Task")), "==", params["tasks"])
                tasks = models.end.todoist.Task.by_ids(params["tasks"])
                test.case({task.is_completed for task in tasks}, "==", {True})
                """,
            ),
        ),
    ),
    Scenario(
        id="demo08",
        split="dev",
        difficulty=1,
        apps=("gmail",),
        instruction="Star all unread threads in my Gmail inbox that $name ($email) sent me.",
        plan=_star,
        solution=login("gmail")
        + paged("threads", "apis.gmail.show_inbox_threads(access_token=gmail, read=False, from_email=$email")
        + """\
# --- step
for thread in threads:
    if not thread["starred"]:
        apis.gmail.mark_thread_starred(access_token=gmail, email_thread_id=thread["email_thread_id"])
# --- step
apis.supervisor.complete_task()
""",
        checks=(
            no_answer(),
            only_changes("gmail.UserEmailThread"),
            only_edits("gmail.UserEmailThread", "starred"),
            Check(
                "assert that exactly the unread threads from that person were edited, and are starred now.",
                "no_op_fail",
                """
                test.case(list(edited(models, "gmail.UserEmailThread")), "==", params["threads"])
                threads = models.end.gmail.UserEmailThread.by_ids(params["threads"])
                test.case({thread.starred for thread in threads}, "==", {True})
                """,
            ),
        ),
    ),
    Scenario(
        id="demo09",
        split="test_normal",
        difficulty=1,
        apps=("file_system",),
        instruction="Delete all .$extension files in the downloads folder of my home folder, "
        "including those in its subfolders.",
        plan=_tidy,
        solution=login("file_system")
        + """\
paths = apis.file_system.show_directory(
    access_token=file_system, directory_path="~/downloads/", entry_type="files", recursive=True
)
# --- step
for path in paths:
    if path.endswith("." + $extension):
        apis.file_system.delete_file(access_token=file_system, file_path=path)
# --- step
apis.supervisor.complete_task()
""",
        checks=(
            no_answer(),
            # A folder's date moves when a file in it goes.
            only_changes("file_system.File", "file_system.Directory"),
            Check(
                "assert that exactly the files with that extension below downloads were deleted.",
                "no_op_fail",
                'test.case(removed(models, "file_system.File"), "==", params["files"])',
            ),
            Check(
                "assert that no file was added or edited.",
                "no_op_pass",
                """
                files = "file_system.File"
                test.case([added(models, files, "path"), edited(models, files)], "==", [[], {}])
                """,
            ),
            Check(
                "assert that no folder was added, removed or moved.",
                "no_op_pass",
                """
                folders = "file_system.Directory"
                test.case([added(models, folders, "path"), removed(models, folders)], "==", [[], []])
                test.case([fields for fields in edited(models, folders).values() if fields], "==", [])
                """,
            ),
        ),
    ),
)
