"""A pipe whose closing kills: how every process dies with the server, whatever it is doing.

The server holds the writing end, the process the reading end, for which the kernel is told to send SIGKILL to the
process's group when something happens on it. Nothing is ever written, so what can happen is that the last writer
closes: on purpose (`Lifeline.cut`), or because the server is gone, also by `kill -9`. Unlike PR_SET_PDEATHSIG it
does not depend on who the parent is, so a world outlives the template that it was forked from; and unlike `os.kill`
it can't hit a stranger who got the same pid.

A process that wants to escape can close its end; so the server kills by pid as well when one does not die of this.
"""

from __future__ import annotations

import fcntl
import os
import signal

# Missing from Python's fcntl before 3.13; the value is the same on every Linux architecture.
F_SETSIG = 10


def tie(fd: int) -> None:
    """In the process: die, with the whole process group, when the other end of `fd` closes.

    The open file behind `fd` must be this process's own (sent to it, not inherited): its owner is one for all sharers.
    """
    fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(fd, F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    # A writer that closed before O_ASYNC was set sent no signal: the end of file tells.
    os.set_blocking(fd, False)
    try:
        if os.read(fd, 1) == b"":
            os.kill(os.getpid(), signal.SIGKILL)
    except BlockingIOError:
        pass


class Lifeline:
    """In the server: the end that is held. `far` is the fd to hand to the process, closed here by `handed_over`."""

    def __init__(self) -> None:
        self.far, self._held = os.pipe()
        self._handed_over = False

    def handed_over(self) -> None:
        if not self._handed_over:
            self._handed_over = True
            os.close(self.far)

    def cut(self) -> None:
        """Kill the process. Harmless when repeated."""
        self.handed_over()
        if self._held >= 0:
            os.close(self._held)
            self._held = -1
