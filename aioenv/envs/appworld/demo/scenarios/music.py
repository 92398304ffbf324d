"""Spotify: counting playlists, liking songs, finding the favourite artist."""

from __future__ import annotations

from datetime import datetime
from random import Random

from aioenv.envs.appworld.demo import catalog
from aioenv.envs.appworld.demo.people import PEOPLE
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

_TITLES = ("rain", "cooking", "long drives", "focus", "old friends", "sunday", "running", "tea", "moving boxes")


def _playlists(world: World, number: int, rng: Random) -> Plan:
    person = PEOPLE[number]
    # Two apart per task, so that the answers of siblings differ whatever the seed.
    private = 2 * number + 2 + rng.randrange(2)
    for index in range(private):
        world.playlist(person, f"private {index + 1}: {rng.choice(_TITLES)}", ["Riverkeeper"])
    for index in range(rng.randrange(4, 8)):
        world.playlist(person, f"shared {index + 1}: {rng.choice(_TITLES)}", ["Receipts"], public=True)
    answer = world.model("spotify.Playlist").count(user_id=person.number, is_public=False)
    kind = "private"
    return Plan(person, datetime(2024, 2, 3 + number, 18, 20), {"kind": kind}, answer)


def _like_playlist(world: World, number: int, rng: Random) -> Plan:
    person = PEOPLE[3 + number]
    title = ("Kitchen radio", "Gym bag", "Night train")[number - 1]
    songs = rng.sample([song for _, _, songs in catalog.ARTISTS for song in songs], 5 + number)
    world.playlist(person, title, songs)
    liked = world.model("spotify.SongLike").find_all_take_fields("song_id", user_id=person.number)
    ids = [world.song_id(song) for song in songs]
    for song in ids[:2]:
        if song not in liked:
            world.add("spotify.SongLike", user_id=person.number, song_id=song)
            liked.append(song)
    missing = sorted(song for song in ids if song not in liked)
    likes = [[person.number, song] for song in missing]
    return Plan(person, datetime(2024, 2, 12 + number, 21, 5), {"title": title}, private={"likes": likes})


def _favourite(world: World, number: int, rng: Random) -> Plan:
    person = PEOPLE[6 + number]
    # One apart by chance and three by number: siblings never share their answer.
    start = rng.randrange(2)
    artist, _, titles = catalog.ARTISTS[(start + 3 * number) % len(catalog.ARTISTS)]
    others = [title for name, _, songs in catalog.ARTISTS if name != artist for title in songs[number : number + 2]]
    have = world.model("spotify.UserLibrarySong").find_all_take_fields("song_id", user_id=person.number)
    songs = [world.song_id(title) for title in [*titles, *others]]
    rows = [{"user_id": person.number, "song_id": song} for song in songs if song not in have]
    world.add_all("spotify.UserLibrarySong", rows)
    return Plan(person, datetime(2024, 2, 20 + number, 8, 45), {"place": "song library"}, artist)


SCENARIOS = (
    Scenario(
        id="demo01",
        split="train",
        difficulty=1,
        apps=("spotify",),
        instruction="How many of the playlists in my Spotify library are $kind?",
        plan=_playlists,
        solution=login("spotify")
        + paged("playlists", "apis.spotify.show_playlist_library(access_token=spotify")
        + "# --- step\n"
        + 'count = sum(1 for playlist in playlists if not playlist["is_public"])\n'
        + "apis.supervisor.complete_task(answer=count)\n",
        checks=(answer_is("the number of private playlists"), reported_success(), only_changes()),
    ),
    Scenario(
        id="demo02",
        split="train",
        difficulty=2,
        apps=("spotify",),
        instruction='Like all songs on my Spotify playlist "$title" that I have not liked yet.',
        plan=_like_playlist,
        solution=login("spotify")
        + paged("playlists", "apis.spotify.show_playlist_library(access_token=spotify")
        + """\
mine = [playlist for playlist in playlists if playlist["title"] == $title][0]
# --- step
for song_id in mine["song_ids"]:
    if not apis.spotify.show_song_privates(access_token=spotify, song_id=song_id)["liked"]:
        apis.spotify.like_song(access_token=spotify, song_id=song_id)
# --- step
apis.supervisor.complete_task()
""",
        checks=(
            no_answer(),
            only_changes("spotify.SongLike", "spotify.Song"),
            Check(
                "assert that exactly the missing likes were added for the supervisor.",
                "no_op_fail",
                'test.case(added(models, "spotify.SongLike", "user_id", "song_id"), "==", params["likes"])',
            ),
            keeps("spotify.SongLike", but_adds=True),
            only_edits("spotify.Song", "like_count"),
        ),
    ),
    Scenario(
        id="demo03",
        split="train",
        difficulty=2,
        apps=("spotify",),
        instruction="By which artist do I have the most songs in my Spotify $place? Answer with the name.",
        plan=_favourite,
        solution=login("spotify")
        + paged("songs", "apis.spotify.show_song_library(access_token=spotify")
        + """\
# --- step
counts = {}
for song in songs:
    for artist in song["artists"]:
        counts[artist["name"]] = counts.get(artist["name"], 0) + 1
# --- step
apis.supervisor.complete_task(answer=max(counts, key=counts.get))
""",
        checks=(answer_is("the artist with the most songs"), reported_success(), only_changes()),
    ),
)
