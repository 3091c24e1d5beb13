"""A slot from inside: the process that runs jobs, and its channel to the supervisor."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import psutil

from .. import telemetry
from ..interrupt import Stop, start_thread
from .current_job import SlotState
from .execute import Unrecorded
from .messages import End, JobOver, Log, Message, Signalled, SlotFailed, Told, Wake
from .outcome import Fault, Outcome, describe
from .plain_data import as_bytes
from .shared_memory import SharedMemory

__all__ = ["SlotChannel", "run_slot"]

logger = logging.getLogger("djjobs")

#: How long what an interrupted make() has started may take to end when it is asked to.
_PATIENCE = 2.0
#: When a process was started is told to a hundredth of a second.
_CLOCK_TICK = 0.02


class SlotChannel:
    """A slot's own end of the connection to its supervisor."""

    def __init__(self, memory: SharedMemory, messages: Connection, orders: Connection) -> None:
        self.memory = memory
        self._messages, self._orders = messages, orders
        self._supervisor = os.getppid()
        self._state: SlotState | None = None
        self._is_told_to_end = False
        self._awake = threading.Event()
        self._sending = threading.RLock()
        #: Jobs that ran when a signal came. The handler of a signal may do no more than note it and wake up the thread.
        self._signalled: deque[tuple[str, int]] = deque()
        self._woken_up, self._wake_up = os.pipe()
        os.set_blocking(self._wake_up, False)
        start_thread(self._hear)

    def send(self, message: Message) -> None:
        data = as_bytes(message)
        with self._sending:
            self._messages.send_bytes(data)

    def report(self, outcome: Outcome) -> None:
        """Tell the supervisor what came of a job."""
        self.send(JobOver.of(outcome))

    def listen(self, state: SlotState) -> None:
        """Let requests about jobs arrive there, and leave it to the supervisor when to stop."""
        state.end_processes_of = _end_processes_of
        state.stop.ask_about = self._note_signal
        self._state = state
        if self._is_told_to_end:
            state.stop.request(signal.SIGTERM)

    def wait_until_woken(self, stop: Stop) -> None:
        """Sleep until the supervisor says that there may be jobs."""
        with stop.interruptible():
            while not self._awake.wait(60):
                pass
        self._awake.clear()

    def leave(self, code: int) -> NoReturn:
        """End the process at once: multiprocessing would wait for threads and processes that make() has left."""
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            self._messages.close()
        if os.getppid() != self._supervisor:
            # There is nobody any more who would end what make() has left.
            os.killpg(0, signal.SIGKILL)
        os._exit(code)

    # -- what the supervisor and others want ---------------------------------------------------------------

    def _note_signal(self, _number: int) -> None:
        """A signal came: from the supervisor, who says so, or from make() itself or somebody else. Between jobs it
        means nothing.
        """
        token = self._state.token if self._state is not None else None
        if token is not None and not self._is_told_to_end:
            self._signalled.append(token)
            with contextlib.suppress(OSError):
                os.write(self._wake_up, b".")

    def _hear(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                ready = wait([self._orders, self._woken_up])
                if self._orders in ready:
                    self._obey(self._orders.recv())
                elif os.read(self._woken_up, 1) and self._signalled and not self._is_told_to_end:
                    self.send(Signalled(*self._signalled.popleft()))
        if not self._is_orphan():
            # make() has closed the pipe. The supervisor sees that, too.
            return
        self._is_told_to_end = True
        if self._state is None:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self._state.stop.request(signal.SIGTERM)

    def _is_orphan(self) -> bool:
        """Whether the supervisor is gone, however it went. The kernel closes its files first, and tells that later."""
        deadline = time.monotonic() + _PATIENCE
        while os.getppid() == self._supervisor:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def _obey(self, order: Any) -> None:
        if isinstance(order, Wake):
            self._awake.set()
        elif isinstance(order, End):
            self._is_told_to_end = True
            if self._state is not None:
                self._state.stop.request(signal.SIGTERM)
        elif self._state is not None:
            self._state.ask(order)


def run_slot(
    main: Callable[[SlotChannel], None],
    memory: SharedMemory,
    messages: Connection,
    orders: Connection,
    output: int,
    not_its_own: list[int],
    supervisor: int | None,
) -> None:
    """What the process of a slot does. It never returns."""
    _have_own_group()
    if supervisor is not None:
        _die_with(supervisor)
    for end in not_its_own:
        os.close(end)
    _redirect(output)
    channel = SlotChannel(memory, messages, orders)
    logger.handlers, logger.propagate = [_ToSupervisor(channel)], False
    telemetry.forward_to(lambda event: channel.send(Told.of(event)))
    code = 0
    try:
        main(channel)
    except (KeyboardInterrupt, SystemExit):
        # The supervisor asked for it, or is gone; it knows. If the slot still holds something, its memory says so.
        pass
    except Unrecorded as error:
        # The supervisor settles the job, and what is printed here tells why it has to.
        print(describe(error), file=sys.stderr)
        code = 1
    except BaseException as error:
        with contextlib.suppress(OSError):
            channel.send(SlotFailed(Fault.of(error)))
    finally:
        channel.leave(code)


def _have_own_group() -> None:
    """Have a process group of one's own, with all that make() will start.

    What a terminal or a cluster sends to the group of the worker is for the supervisor, and what is left of a slot can
    be ended with it.
    """
    os.setpgid(0, 0)
    for number in (signal.SIGTTIN, signal.SIGTTOU):
        # To read from the terminal is an error in the background, instead of a process that is stopped for ever.
        signal.signal(number, signal.SIG_IGN)


def _redirect(output: int) -> None:
    """What is printed goes to the supervisor, and there is nothing to read."""
    sys.stdout.flush()
    sys.stderr.flush()
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    sys.stdin = open(os.devnull)  # noqa: SIM115 - for as long as the process lives
    os.dup2(sys.stdin.fileno(), 0)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


class _ToSupervisor(logging.Handler):
    """Lets the supervisor write the log, so that a line of it is never mixed with what make() prints."""

    def __init__(self, channel: SlotChannel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            self._channel.send(Log.of(record))


def _die_with(supervisor: int) -> None:
    """Let the kernel kill this process when its supervisor is killed, even if it is deep in C code."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
        if os.getppid() != supervisor:
            os._exit(1)


def _end_processes_of(seconds: float) -> None:
    """End the processes that make() has started in the last so many seconds and left, but those that it has detached.

    They are found by their group, for one whose parent has ended is no child of this process any more.
    """
    began = _now() - seconds - _CLOCK_TICK
    left = [process for process in psutil.process_iter(["create_time"]) if _is_left(process, began)]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
        _, left = psutil.wait_procs(left, timeout=_PATIENCE) if left else ([], [])


def _is_left(process: psutil.Process, began: float) -> bool:
    try:
        is_ours = process.pid != os.getpid() and os.getpgid(process.pid) == os.getpgrp()
    except OSError:
        return False
    return is_ours and process.info["create_time"] >= began


def _now() -> float:
    """The time by the clock that tells when a process was started. On Linux it is not the clock on the wall."""
    since_boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.time() if since_boot is None else psutil.boot_time() + time.clock_gettime(since_boot)
