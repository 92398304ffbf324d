"""Frames on a process's pipe: a 4-byte big-endian length, then that many bytes of JSON.

Both ends use this: the server feeds what it read to a `FrameDecoder`, a worker process talks through a blocking
`Channel`. Nothing is ever unpickled: what a world sends was written by a model's code, if that code wants it so.
"""

from __future__ import annotations

import gc
import os
import socket
import struct
from array import array
from collections import deque
from typing import Any

import orjson

HEADER = struct.Struct("!I")
# Larger than any body that the server takes by default (64 MiB), so that an answer may be larger than its question.
FRAME_LIMIT = 80 * 2**20
_LARGE = 2**16
_READ_SIZE = 2**15  # each read takes a buffer of that size; larger ones cost more than the reads they save
_ANCILLARY_SIZE = socket.CMSG_LEN(8 * array("i").itemsize)


class FrameError(Exception):
    """The bytes are no frame: too long, or not a JSON object. The exchange can't be saved."""


def load_json(data: bytes | memoryview) -> Any:
    """As `orjson.loads`, but that Python's cyclic collector doesn't walk over a large document again and again while
    it is being made: for one of many small lists that takes ten times as long as the parsing."""
    if len(data) < _LARGE:
        return orjson.loads(data)
    gc.disable()
    try:
        return orjson.loads(data)
    finally:
        gc.enable()


def pack(frame: dict[str, Any]) -> bytes:
    """One frame, ready to send.

    Raises TypeError where a value can't be carried by JSON and FrameError where the frame is over `FRAME_LIMIT`.
    """
    body = orjson.dumps(frame)
    if len(body) > FRAME_LIMIT:
        raise FrameError(f"the message takes {len(body):,} bytes, over the limit of {FRAME_LIMIT:,}")
    return HEADER.pack(len(body)) + body


def _parse(body: bytes | memoryview) -> dict[str, Any]:
    try:
        frame = load_json(body)
    except orjson.JSONDecodeError as error:
        raise FrameError(f"a frame is not JSON: {error}") from None
    if not isinstance(frame, dict):
        raise FrameError(f"a frame is a JSON {type(frame).__name__}, not an object")
    return frame


class FrameDecoder:
    """Cuts a stream of bytes into frames, however it was split. Does no I/O."""

    def __init__(self, limit: int = FRAME_LIMIT) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[dict[str, Any]]:
        """The frames that `data` completes. Raises FrameError; the decoder is of no use afterwards."""
        size = len(data) - HEADER.size
        if not self._buffer and 0 <= size <= self._limit and HEADER.unpack_from(data)[0] == size:
            return [_parse(data[HEADER.size :])]  # nearly always a read is one frame, whole
        self._buffer += data
        frames = []
        position = 0
        while len(self._buffer) - position >= HEADER.size:
            (length,) = HEADER.unpack_from(self._buffer, position)
            if length > self._limit:
                raise FrameError(f"a frame of {length:,} bytes was announced, over the limit of {self._limit:,}")
            end = position + HEADER.size + length
            if len(self._buffer) < end:
                break
            # A view held on would forbid the `del` below, so it goes before that.
            with memoryview(self._buffer) as view, view[position + HEADER.size : end] as body:
                frames.append(_parse(body))
            position = end
        if position:
            del self._buffer[:position]
        return frames

    @property
    def pending(self) -> int:
        """Bytes of a frame that is not complete yet."""
        return len(self._buffer)


class Channel:
    """A worker's blocking end of its pipe; takes file descriptors along (SCM_RIGHTS)."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._decoder = FrameDecoder()
        self._frames: deque[dict[str, Any]] = deque()
        self._fds: deque[int] = deque()

    def send_bytes(self, packed: bytes) -> None:
        self.sock.sendall(packed)

    def receive(self) -> dict[str, Any] | None:
        """The next frame; None at the end of the stream."""
        while not self._frames:
            try:
                data, ancillary, _, _ = self.sock.recvmsg(_READ_SIZE, _ANCILLARY_SIZE)
            except ConnectionResetError:  # ended with our last words unread
                return None
            for level, kind, packed in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds = array("i")
                    fds.frombytes(packed[: len(packed) - len(packed) % fds.itemsize])
                    for fd in fds:
                        os.set_inheritable(fd, False)
                        self._fds.append(fd)
            if not data:
                return None
            self._frames.extend(self._decoder.feed(data))
        return self._frames.popleft()

    @property
    def buffered(self) -> bool:
        """A frame was read already: `receive` won't block, and no selector will say so."""
        return bool(self._frames)

    def take_fds(self, count: int) -> list[int]:
        """The next `count` descriptors that came with frames, as sent. Raises FrameError if fewer came."""
        if len(self._fds) < count:
            raise FrameError(f"{count} file descriptors expected, {len(self._fds)} came")
        return [self._fds.popleft() for _ in range(count)]

    def close(self) -> None:
        self.sock.close()
        while self._fds:
            os.close(self._fds.popleft())
