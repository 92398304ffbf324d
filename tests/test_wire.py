"""The frame parser: whatever the split of the bytes, the same frames; whatever is no frame, a FrameError."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioenv.pool.answer import NoAnswer, read_answer
from aioenv.pool.wire import HEADER, LARGE, Channel, FrameDecoder, FrameError, load_object, pack

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=5,
)
# Small ones, and some at the size where a body gets room of its own.
bodies = st.dictionaries(st.text(), json_values) | st.integers(-3, 3).map(lambda more: {"": "x" * (LARGE - 5 + more)})
frames = st.lists(st.tuples(st.integers(0, 2**32 - 1), bodies), max_size=4)


@given(frames, st.data())
def test_any_split_of_the_bytes_gives_the_same_frames(
    sent: list[tuple[int, dict[str, Any]]], data: st.DataObject
) -> None:
    stream = b"".join(pack(number, body) for number, body in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    decoder = FrameDecoder()
    got = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += decoder.feed(stream[start:end])
    assert [(number, load_object(body)) for number, body in got] == sent
    assert decoder.pending == 0


@given(st.binary())
def test_junk_gives_frames_or_a_frame_error_and_nothing_else(junk: bytes) -> None:
    try:
        for number, body in FrameDecoder(limit=1000).feed(junk):
            assert number >= 0
            load_object(body)
    except FrameError:
        pass


def test_a_frame_over_the_limit_is_refused_by_its_announcement() -> None:
    with pytest.raises(FrameError, match="over the limit"):
        FrameDecoder(limit=10).feed(HEADER.pack(11, 1))


@pytest.mark.parametrize("body", [b"no json", b"[1]", b'"text"', b"\xff\xfe", b'{"error": 5}'])
def test_what_is_no_json_object_is_no_answer(body: bytes) -> None:
    with pytest.raises(NoAnswer):
        read_answer(body)


def test_a_channel_takes_file_descriptors_along_in_order() -> None:
    ours, theirs = socket.socketpair()
    first, second = os.pipe()
    with ours, theirs:
        socket.send_fds(ours, [pack(1, {})], [first])
        socket.send_fds(ours, [pack(2, {"a": 1})], [second])
        channel = Channel(theirs)
        assert [channel.receive(), channel.receive()] == [(1, {}), (2, {"a": 1})]
        got = channel.take_fds(2)
        os.close(first)
        os.write(got[1], b"through")
        assert os.read(got[0], 10) == b"through"
        assert not os.get_inheritable(got[0])
        with pytest.raises(FrameError, match="1 file descriptors expected, 0 came"):
            channel.take_fds(1)
        for fd in (second, *got):
            os.close(fd)


def test_a_channel_tells_the_end_of_the_stream() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        assert Channel(theirs).receive() is None
