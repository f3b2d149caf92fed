"""Writer processes of asynchronous saves that are forks: importing PyTorch takes longer than most tests.

A forked writer works for processes without a process group only: it inherits the group of the process that it forks.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import traceback
from typing import Any

from apex.checkpoint import _writer


class ForkedWriter:
    """A fork that serves requests, with the methods of `subprocess.Popen` that `apex.checkpoint` uses."""

    def __init__(self, channel: int, meeting: Any, inherited: list[int], module: str) -> None:
        assert meeting is None
        self._status: int | None = None
        self.pid = os.fork()
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
