"""Asynchronous saves: state is copied to host memory beside the training, and another process writes it.

There is one writer process for each training process, from the first asynchronous save on. At most one save is in
flight: its memory is used again by the next one.

PyTorch's own `async_save` is not used. Its background process imports the main script again, so every script would need
a guard (`if __name__ == "__main__"`). It needs a process group even for one process, it cannot publish a folder by this
package's rules, and its stagers came with PyTorch 2.9.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import io
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .. import _env
from .._distributed.collectives import gather_objects
from .._distributed.groups import make_group, timeout_of
from ..ops._host import on_host
from ..ops._staging import Copies, HostBuffer
from . import _writer
from ._ranks import from_first, is_connected, is_first, this_rank

# Saves that no call has waited for, with the paths of their checkpoints.
UNAWAITED: dict[concurrent.futures.Future[None], Path] = {}
# Seconds to wait for the end of an idle writer process.
_PATIENCE = 10


class SaveInProgress(RuntimeError):
    """The error of a save with `if_busy="raise"` while an earlier save is in flight."""


class _Writer:
    """This process's connection to its writer process, and the memory that both share."""

    def __init__(self) -> None:
        self._owner, self._world = os.getpid(), _default_group()
        self._buffer: HostBuffer | None = None
        self._is_new_buffer = False
        # The training processes' group for agreements about saves. Unlike NCCL, Gloo does not wait for the device.
        self.group: Any = None
        self._listener: socket.socket | None = None
        self._meeting: _writer.Meeting | None = None
        if is_connected() and dist.get_world_size() > 1:
            self.group = make_group(backend="gloo")
            self._listener, self._meeting = _meeting()
        self._channel: socket.socket | None = None
        self._process: Any = None

    def start(self, module: str) -> None:
        """Start the writer process unless it runs; it imports `module` while the tensors are copied."""
        if self._channel is not None:
            return
        self._channel, theirs = socket.socketpair()
        inherited = [theirs.fileno(), *([] if self._listener is None else [self._listener.fileno()])]
        self._process = start_process(theirs.fileno(), self._meeting, inherited, module)
        theirs.close()
        self._close_listener()

    def is_own(self) -> bool:
        """Return True if this process has started the writer, and did not inherit it in a fork."""
        return self._owner == os.getpid()

    def is_usable(self) -> bool:
        """Return True if this process started the writer under the current default process group."""
        return self.is_own() and self._world is _default_group()

    def stage(self, data: Any, on_device: bool) -> tuple[bytes, Copies]:
        """Start copies of the tensors in `data`; return the pickled rest of `data`, and the copies."""
        file = io.BytesIO()
        pickler = _writer.Pickler(file)
        pickler.dump(data)
        pinned = any(not on_host(tensor) for tensor, _ in pickler.tensors)
        if self._buffer is None or self._buffer.size < pickler.size:
            if self._buffer is not None:
                self._buffer.close()
                self._buffer = None
            self._buffer = HostBuffer(max(pickler.size, 1), pinned)
            self._is_new_buffer = True
        self._buffer.pin(pinned)
        return file.getvalue(), Copies(self._buffer.memory, pickler.tensors, on_device)

    def call(self, request: tuple[Any, ...], copies: Copies, failed: str) -> None:
        """Wait for the copies, then for the writer; raise its error. Runs in a thread."""
        message = pickle.dumps(request)
        copies.finish()
        assert self._buffer is not None
        assert self._channel is not None
        memory = (self._buffer.descriptor, self._buffer.size) if self._is_new_buffer else None
        try:
            _writer.send(self._channel, message, memory)
            self._is_new_buffer = False
            received = _writer.receive(self._channel)
        except OSError:
            received = None
        if received is None:
            status = self._process.wait()
            raise RuntimeError(f"{failed}; the process that writes for rank {this_rank()} ended with status {status}")
        answer = pickle.loads(received[0])
        if answer is not None:
            number, text = answer
            text = text if text.startswith(failed) else f"{failed}; rank {this_rank()} had {text}"
            raise RuntimeError(text) if number is None else OSError(number, text)

    def close(self) -> None:
        """End the idle writer process and free the shared memory."""
        if self._channel is not None:
            with contextlib.suppress(OSError):  # the writer has ended
                self._channel.shutdown(socket.SHUT_RDWR)  # closing is not enough: forked processes have it open too
            self._channel.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_PATIENCE)
        self._close_listener()
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    def forget(self) -> None:
        """Close a forked process's copies of the connections, so that the writer notices when its own parent ends."""
        if self._channel is not None:
            self._channel.close()
        self._close_listener()

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def _default_group() -> Any:
    """Return the default process group, or None; a group made after `destroy_process_group` is another object."""
    return dist.group.WORLD if is_connected() else None


def _meeting() -> tuple[socket.socket | None, _writer.Meeting]:
    """Agree on a store for the writers; return rank 0's listening socket and the description of the group."""
    listener = None
    if is_first():
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        listener = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=both)
    name = socket.gethostname()
    first, host, port = from_first((name, _env.master_address() or name, listener and listener.getsockname()[1]))
    meeting = _writer.Meeting(
        rank=dist.get_rank(),
        ranks=dist.get_world_size(),
        host="localhost" if first == name else host,
        port=port,
        listener=None if listener is None else listener.fileno(),
        timeout=timeout_of(dist.group.WORLD),
        parent=os.getpid(),
    )
    return listener, meeting


def start_process(channel: int, meeting: _writer.Meeting | None, inherited: list[int], module: str) -> Any:
    """Start a writer process. It imports this package, but not the user's script."""
    text = pickle.dumps((channel, meeting, module)).hex()
    # The user's folders come last: a script's random.py or logging.py must not take the place of Python's own module.
    root = str(Path(__file__).parents[2])
    program = (
        f"import sys; own = [path for path in sys.path if path]; first = [] if {root!r} in own else [{root!r}]; "
        f"sys.path[:] = first + own + [path for path in {sys.path!r} if path not in own]; import pickle; "
        f"from apex.checkpoint._writer import serve; serve(*pickle.loads(bytes.fromhex({text!r})))"
    )
    command = [sys.executable, "-c", program]
    return subprocess.Popen(
        command, pass_fds=inherited, stdin=subprocess.DEVNULL, env=_env.without_devices(), close_fds=True
    )


_writer_of_process: _Writer | None = None
_thread: concurrent.futures.ThreadPoolExecutor | None = None
# Held by a thread that starts a save or waits for a save, because the shared memory holds one save.
_lock = threading.RLock()
# The save in flight, also in processes that do not write.
_saving: concurrent.futures.Future[None] | None = None


def submit(
    function: str,
    path: Path,
    prepare: Callable[[], tuple[Any, Any]],
    staging: str,
    if_busy: str,
    *,
    together: bool = True,
) -> None:
    """Start a function of this package, "module:name", in the writer processes of all ranks; all processes call it.

    The call is `function(path, plan, data)` with the result of `prepare()`. If not `together`, only the first rank has
    a writer process. Returns when the copies of the tensors in `data` have been started. Nothing may change `plan`,
    which has no tensors and is pickled by a thread. All processes raise if `prepare` fails in any.
    """
    global _writer_of_process, _thread, _saving
    if not hasattr(socket, "send_fds"):
        raise NotImplementedError("use_async=True needs an operating system with Unix sockets; save without it")
    with _lock:
        if if_busy == "raise" and is_busy():
            raise SaveInProgress(f"the checkpoint {path} was not saved: the save before it is still being written")
        wait()
        failed = f"the checkpoint {path} could not be written"
        if _writer_of_process is None or not _writer_of_process.is_usable():
            _close()
            _writer_of_process, _thread = _Writer(), concurrent.futures.ThreadPoolExecutor(1, "apex-save")
        writer, failure = _writer_of_process, None
        module, _, name = function.partition(":")
        writes = together or is_first()
        assert _thread is not None
        try:
            if writes:
                writer.start(module)
            plan, data = prepare()
            pickled, copies = writer.stage(data, staging == "device") if writes else (b"", None)
        except Exception as error:
            failure = error
        text = f"{failed}; rank {this_rank()} had {type(failure).__name__}: {failure}"
        _raise_everywhere(failure, text, writer.group)
        if copies is None:
            _saving = concurrent.futures.Future()
            _saving.set_result(None)
        else:
            _saving = _thread.submit(writer.call, (together, module, name, (path, plan), pickled), copies, failed)
        UNAWAITED[_saving] = path


def check_options(staging: str, if_busy: str) -> None:
    """Raise ValueError for unknown options of an asynchronous save."""
    if staging not in ("host", "device"):
        raise ValueError(f'staging must be "host" or "device", got {staging!r}')
    if if_busy not in ("wait", "raise"):
        raise ValueError(f'if_busy must be "wait" or "raise", got {if_busy!r}')


def is_busy() -> bool:
    """Return whether any rank is still writing the save in flight; all processes must call it."""
    if _saving is None or _writer_of_process is None:
        return False
    return any(gather_objects(not _saving.done(), "asking whether a save is done", _writer_of_process.group))


def wait() -> None:
    """Wait until the asynchronous save in flight is complete; all processes must call it.

    Raises in all processes if the save failed in any of them: an OSError with the system's number if there is one,
    otherwise a RuntimeError. Does nothing if no save is in flight.
    """
    global _saving
    with _lock:
        saving = _saving
        if saving is None or _writer_of_process is None:
            return
        failure = saving.exception()  # if this is interrupted, the save stays in flight
        _saving = None
        del UNAWAITED[saving]
        try:
            _raise_everywhere(failure, _writer.text_of(failure), _writer_of_process.group)
        except BaseException:  # the writers of all ranks begin anew
            _close()
            raise


def _close() -> None:
    """End this process's writer if there is one."""
    global _writer_of_process
    if _writer_of_process is not None and _writer_of_process.is_own():
        _writer_of_process.close()
    _writer_of_process = None


def _raise_everywhere(failure: BaseException | None, text: str, group: Any) -> None:
    """Raise an error with this text in all processes if any of them failed. Uses host memory and Gloo alone."""
    own = None if failure is None else (getattr(failure, "errno", None), text)
    for failed in gather_objects(own, "asking whether all ranks can write a checkpoint", group):
        if failed is not None:
            number, message = failed
            raise (RuntimeError(message) if number is None else OSError(number, message)) from failure


def _forget_in_child() -> None:
    """Forget the save in flight in a forked process: its thread and its writer belong to the parent process."""
    global _saving, _lock
    _saving, _lock = None, threading.RLock()
    UNAWAITED.clear()
    if _writer_of_process is not None:
        _writer_of_process.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


@atexit.register
def _finish() -> None:
    """End the process with status 1 if an asynchronous save failed and nothing has waited for it.

    An exception at exit would only be printed, with status 0. Exit functions that were registered before this module
    was imported are not called if a save failed.
    """
    failed = False
    for saving, path in UNAWAITED.items():
        failure = saving.exception()
        if failure is not None:
            failed = True
            print(f"the checkpoint {path} could not be written:", file=sys.stderr)
            traceback.print_exception(failure)
    if failed:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    _close()
