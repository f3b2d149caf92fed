"""Writer processes of asynchronous saves that are forks: importing PyTorch takes longer than most tests.

`ForkedWriter` is for processes without a process group: it inherits the group of the process that it forks. Processes
with a group call `prepare` before they make it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import time
import traceback
from dataclasses import replace
from typing import Any

from apex.checkpoint import _background, _writer
from tests.support.forks import fork


class ForkedWriter:
    """A fork that serves requests, with the methods of `subprocess.Popen` that `apex.checkpoint` uses."""

    def __init__(self, channel: int, meeting: Any, inherited: list[int], module: str) -> None:
        assert meeting is None
        self._status: int | None = None
        self.pid = fork()
        if self.pid:
            return
        try:
            # As in a new process, no other descriptor of the connection is open: the reader sees that it is closed.
            for number in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    if int(number) not in inherited and os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                        os.close(int(number))
            _writer.serve(channel, None, module)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while self._status is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self._status = os.waitstatus_to_exitcode(status)
                break
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("a writer", timeout or 0)
            time.sleep(0.01)
        return self._status


class PreparedWriter(ForkedWriter):
    """A fork of a process that has no process group yet, which becomes the process's first writer."""

    def __init__(self) -> None:
        self._status: int | None = None
        self._channel, theirs = socket.socketpair()
        self.pid = fork()
        if self.pid:
            theirs.close()
            return
        try:
            # Whoever waits for the end of the parent must not wait for this process, too.
            os.closerange(3, theirs.fileno())
            os.closerange(theirs.fileno() + 1, 1024)
            message, numbers, _, _ = socket.recv_fds(theirs, 1 << 16, 2)
            if message:
                meeting, module = pickle.loads(message)
                if meeting.listener is not None:
                    meeting = replace(meeting, listener=numbers[1])
                _writer.serve(numbers[0], meeting, module)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    def start(self, channel: int, meeting: Any, inherited: list[int], module: str) -> PreparedWriter:
        """Serve requests; takes the arguments of `start_process`."""
        assert inherited[0] == channel
        _background.start_process = self._real
        socket.send_fds(self._channel, [pickle.dumps((meeting, module))], inherited)
        return self

    _real = staticmethod(_background.start_process)


def prepare() -> None:
    """Fork a writer for this process, which has no process group yet; further writers are real processes."""
    _background.start_process = PreparedWriter().start
