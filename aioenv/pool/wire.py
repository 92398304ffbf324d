"""Frames on a process's pipe: the length of the body (4 bytes, big-endian), a number (4 bytes), the body in JSON.

The number tells which question an answer belongs to, so that a large answer need not be read to know that. Both ends
use this: the server feeds what it read to a `FrameDecoder`, a worker process talks through a blocking `Channel`.
Nothing is ever unpickled: what a world sends was written by a model's code, if that code wants it so.
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

HEADER = struct.Struct("!II")
# Larger than any body that the server takes by default (64 MiB), so that an answer may be larger than its question.
FRAME_LIMIT = 80 * 2**20
EXIT_REPORT = 0  # the number of a frame that answers nothing
# Bytes of JSON from which on a document is not read or written on the server's event loop: it takes milliseconds.
LARGE = 2**18
_LONG_PARSE = 2**16
_READ_SIZE = 2**15  # each read takes a buffer of that size; larger ones cost more than the reads they save
_ANCILLARY_SIZE = socket.CMSG_LEN(8 * array("i").itemsize)

Body = bytes | bytearray
Frame = tuple[int, Body]


class FrameError(Exception):
    """The bytes are no frame: too long, or not a JSON object. The exchange can't be saved."""


def load_json(data: Body) -> Any:
    """As `orjson.loads`, but that Python's cyclic collector doesn't walk over a large document again and again while
    it is being made: for one of many small lists that takes ten times as long as the parsing."""
    if len(data) < _LONG_PARSE:
        return orjson.loads(data)
    gc.disable()
    try:
        return orjson.loads(data)
    finally:
        gc.enable()


def load_object(body: Body) -> dict[str, Any]:
    """What a frame's body says. Raises FrameError where that is not a JSON object."""
    try:
        value = load_json(body)
    except orjson.JSONDecodeError as error:
        raise FrameError(f"a frame is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise FrameError(f"a frame is a JSON {type(value).__name__}, not an object")
    return value


def pack(number: int, body: dict[str, Any], limit: int = FRAME_LIMIT) -> bytes:
    """One frame, ready to send.

    Raises TypeError where a value can't be carried by JSON and FrameError where the body is over `limit` bytes.
    """
    encoded = orjson.dumps(body, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY)
    if len(encoded) > limit:
        raise FrameError(f"the message takes {len(encoded):,} bytes, over the limit of {limit:,}")
    return HEADER.pack(len(encoded), number) + encoded


def _plain(value: Any) -> Any:
    """What orjson leaves to others: subclasses of float, as a mean of numpy's is one."""
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"Type is not JSON serializable: {type(value).__name__}")


def pack_around(number: int, body: dict[str, Any], key: str, value: bytes) -> list[bytes]:
    """As `pack`, of `body` with one more `key`, whose value is JSON already: its parts, so that nobody copies it."""
    head = orjson.dumps(body)[:-1] + b',"' + key.encode() + b'":'
    length = len(head) + len(value) + 1
    if length > FRAME_LIMIT:
        raise FrameError(f"the message takes {length:,} bytes, over the limit of {FRAME_LIMIT:,}")
    return [HEADER.pack(length, number) + head, value, b"}"]


class FrameDecoder:
    """Cuts a stream of bytes into frames, however it was split. Does no I/O, and does not look into the bodies."""

    def __init__(self, limit: int = FRAME_LIMIT) -> None:
        self._limit = limit
        self._buffer = bytearray()  # of frames that are not complete, but for the large one's body:
        self._large: bytearray | None = None  # room for all of it, so that it is copied once
        self._number = 0
        self._filled = 0

    def feed(self, data: bytes | memoryview) -> list[Frame]:
        """The frames that `data` completes. Raises FrameError; the decoder is of no use afterwards."""
        size = len(data) - HEADER.size
        if not self._buffer and self._large is None and 0 <= size <= self._limit:
            length, number = HEADER.unpack_from(data)
            if length == size:
                return [(number, bytes(data[HEADER.size :]))]  # nearly always a read is one frame, whole
        frames: list[Frame] = []
        rest = memoryview(data)
        while rest:
            if self._large is None:
                self._buffer += rest
                rest = self._cut(frames)
            else:
                rest = self._fill(rest, frames)
        return frames

    def _cut(self, frames: list[Frame]) -> memoryview:
        """Take the frames that are complete from the buffer, up to a large one's header; what comes after that."""
        position = 0
        while len(self._buffer) - position >= HEADER.size:
            length, number = HEADER.unpack_from(self._buffer, position)
            if length > self._limit:
                raise FrameError(f"a frame of {length:,} bytes was announced, over the limit of {self._limit:,}")
            start, end = position + HEADER.size, position + HEADER.size + length
            if length >= LARGE:
                rest = memoryview(self._buffer[start:])
                self._large, self._number, self._filled = bytearray(length), number, 0
                self._buffer.clear()
                return rest
            if len(self._buffer) < end:
                break
            frames.append((number, self._buffer[start:end]))
            position = end
        del self._buffer[:position]
        return memoryview(b"")

    def _fill(self, data: memoryview, frames: list[Frame]) -> memoryview:
        """Put `data` into the large frame's body; what is left of it."""
        assert self._large is not None
        taken = min(len(data), len(self._large) - self._filled)
        self._large[self._filled : self._filled + taken] = data[:taken]
        self._filled += taken
        if self._filled == len(self._large):
            frames.append((self._number, self._large))
            self._large = None
        return data[taken:]

    @property
    def pending(self) -> int:
        """Bytes of a frame that is not complete yet."""
        return len(self._buffer) + (self._filled + HEADER.size if self._large is not None else 0)


class Channel:
    """A worker's blocking end of its pipe; takes file descriptors along (SCM_RIGHTS)."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._decoder = FrameDecoder()
        self._frames: deque[Frame] = deque()
        self._fds: deque[int] = deque()

    def send_bytes(self, packed: bytes) -> None:
        self.sock.sendall(packed)

    def receive(self) -> tuple[int, dict[str, Any]] | None:
        """The next frame's number and body; None at the end of the stream."""
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
        number, body = self._frames.popleft()
        return number, load_object(body)

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
