"""Adding records to the open databases, one readable call per thing that exists in this world."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from aioenv.envs.appworld.demo.engine import Engine
from aioenv.envs.appworld.demo.people import Person

EPOCH = datetime(2024, 1, 8, 9, 0, 0)
"""The clock of the build: records of the base databases that give no other date were made at this moment."""


class World:
    """All methods save through the engine's own models, so that its hashes, search texts and counters are right."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def model(self, name: str) -> Any:
        """A model class by its full name, say `"spotify.Song"`."""
        app, kind = name.split(".")
        return getattr(self.engine.models[app], kind)

    def add(self, model: str, **fields: Any) -> Any:
        # Not `create_save`: it validates once more than `save` does, and builds a class per model for that.
        record = self.model(model)(**fields)
        record.save()
        return record

    def add_all(self, model: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Like `add` for each row, in one commit."""
        kind = self.model(model)
        kind.save_all([kind(**row) for row in rows])

    def find(self, model: str, **fields: Any) -> Any:
        """The one record with these fields; a missing one is an error in a scenario."""
        record = self.model(model).find_one(**fields)
        if record is None:
            raise LookupError(f"the demo world has no {model} with {fields}")
        return record

    # ---- spotify

    def song_id(self, title: str) -> int:
        return int(self.find("spotify.Song", title=title).id)

    def playlist(self, owner: Person, title: str, songs: Sequence[str], *, public: bool = False) -> int:
        playlist = self.add("spotify.Playlist", title=title, user_id=owner.number, is_public=public, created_at=EPOCH)
        fields = {"playlist_id": playlist.id, "added_at": EPOCH}
        self.add_all("spotify.PlaylistSong", [{"song_id": self.song_id(song), **fields} for song in songs])
        return int(playlist.id)

    # ---- notes, files, messages

    def note(self, owner: Person, title: str, content: str, tags: Sequence[str] = ()) -> int:
        fields = {"title": title, "content": content, "tags": list(tags), "pinned": False}
        note = self.add("simple_note.Note", user_id=owner.number, created_at=EPOCH, updated_at=EPOCH, **fields)
        return int(note.id)

    def folder(self, owner: Person, path: str) -> None:
        """A folder with its parents; paths are absolute and end with a slash."""
        parts = path.strip("/").split("/") if path != "/" else []
        for depth in range(len(parts) + 1):
            partial = "/" + "".join(part + "/" for part in parts[:depth])
            if not self.model("file_system.Directory").exists(user_id=owner.number, path=partial):
                dates = {"created_at": EPOCH, "updated_at": EPOCH}
                self.add("file_system.Directory", user_id=owner.number, path=partial, **dates)

    def file(self, owner: Person, path: str, content: str) -> None:
        """A file below the owner's home folder; `path` is relative to it."""
        full = f"/home/{owner.first.lower()}/{path}"
        self.folder(owner, full.rsplit("/", 1)[0] + "/")
        dates = {"created_at": EPOCH, "updated_at": EPOCH}
        self.add("file_system.File", user_id=owner.number, path=full, content=content, **dates)

    def text(self, sender: Person, receiver: Person, message: str, at: datetime) -> None:
        ids = {"sender_id": sender.number, "receiver_id": receiver.number}
        whole = self.add("phone.GlobalTextMessage", message=message, created_at=at, **ids)
        fields = {"global_text_message_id": whole.id, "created_at": at}
        numbers = (sender.number, receiver.number)
        self.add_all("phone.UserTextMessage", [{"user_id": number, **fields} for number in numbers])

    def mail(
        self, sender: Person, receiver: Person, subject: str, body: str, at: datetime, *, read: bool = True
    ) -> int:
        """A thread of one mail; returns the receiver's thread id."""
        email = self.add(
            "gmail.Email",
            sender_id=sender.number,
            recipient_ids=[receiver.number],
            subject=subject,
            body=body,
            created_at=at,
        )
        dates = {"created_at": at, "updated_at": at}
        whole = self.add("gmail.GlobalEmailThread", email_ids=[email.id], **dates)
        ends = {"global_email_thread_id": whole.id, "email_ids": [email.id], **dates}
        self.add("gmail.UserEmailThread", user_id=sender.number, incoming=False, outgoing=True, read=True, **ends)
        seen = self.add(
            "gmail.UserEmailThread", user_id=receiver.number, incoming=True, outgoing=False, read=read, **ends
        )
        return int(seen.id)

    # ---- todoist

    def project(self, owner: Person, name: str, *, inbox: bool = False) -> int:
        project = self.add("todoist.Project", user_id=owner.number, name=name, is_inbox=inbox, created_at=EPOCH)
        self.add("todoist.ProjectCollaboratorLink", project_id=project.id, user_id=owner.number, created_at=EPOCH)
        return int(project.id)

    def todo(self, owner: Person, project: int, title: str, due: datetime, *, done: bool = False) -> int:
        order = self.model("todoist.Task").count(project_id=project)
        task = self.add(
            "todoist.Task",
            project_id=project,
            user_id=owner.number,
            title=title,
            description="",
            due_date=due,
            priority="medium",
            is_completed=done,
            order_index=order,
            created_at=EPOCH,
        )
        return int(task.id)

    # ---- money

    def venmo(self, sender: Person, receiver: Person, amount: float, note: str, at: datetime) -> None:
        ids = {"sender_id": sender.number, "receiver_id": receiver.number}
        self.add("venmo.Transaction", amount=amount, description=note, created_at=at, updated_at=at, **ids)

    def venmo_request(self, sender: Person, receiver: Person, amount: float, note: str, at: datetime) -> int:
        ids = {"sender_id": sender.number, "receiver_id": receiver.number}
        dates = {"created_at": at, "updated_at": at}
        return int(self.add("venmo.PaymentRequest", amount=amount, description=note, **dates, **ids).id)

    def group(self, owner: Person, name: str, members: Iterable[Person]) -> int:
        """A Splitwise group; the owner should be among the members."""
        # The engine would draw the invitation code from global random state.
        code = f"c{owner.number:02d}{sum(name.encode()) % 1000:03d}"
        fields = {"user_id": owner.number, "name": name, "created_at": EPOCH, "invitation_code": code}
        group = self.add("splitwise.Group", **fields)
        for member in members:
            self.add("splitwise.GroupMember", group_id=group.id, user_id=member.number, joined_at=EPOCH)
        return int(group.id)

    def expense(
        self, group: int, payer: Person, shares: Sequence[tuple[Person, float]], what: str, at: datetime
    ) -> None:
        """`payer` paid for all; `shares` says for what each person owes."""
        expense = self.add(
            "splitwise.Expense",
            user_id=payer.number,
            group_id=group,
            payer_id=payer.number,
            description=what,
            amount=round(sum(share for _, share in shares), 2),
            created_at=at,
        )
        for debtor, share in shares:
            self.add(
                "splitwise.ExpenseShare",
                expense_id=expense.id,
                debtor_id=debtor.number,
                share_amount=share,
                created_at=at,
            )

    def product(self, name: str) -> Any:
        return self.find("amazon.Product", name=name)


def days_before(moment: datetime, days: int, hour: int = 11, minute: int = 0) -> datetime:
    """That many days earlier, at the given time of day."""
    return (moment - timedelta(days=days)).replace(hour=hour, minute=minute, second=0)
