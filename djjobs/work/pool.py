"""The pool: child processes, called slots, and what their supervisor sees of them.

They are forked, so that classes defined in a notebook work, and not daemonic, so that make() may start
processes of its own.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import logging
import os
import pickle
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil

from .. import telemetry
from ..errors import DjJobsError
from ..interrupt import Stop, start_thread
from .current_job import SlotState
from .messages import JobOver, Log, Message, Request, SlotDied, SlotEnded, SlotFailed, Told, Wake
from .outcome import Outcome
from .shared_memory import SharedMemory

__all__ = ["Pool", "Slot", "SlotChannel", "picklable"]

logger = logging.getLogger("djjobs")

#: How many of the last lines that a slot printed are told if it dies.
_LINES_KEPT = 20


class SlotChannel:
    """A slot's own end of the connection to its supervisor."""

    def __init__(self, memory: SharedMemory, messages: Connection, orders: Connection) -> None:
        self.memory = memory
        self._messages, self._orders = messages, orders
        self._state: SlotState | None = None
        self._awake = threading.Event()
        self._sending = threading.RLock()
        start_thread(self._hear)

    def send(self, message: Message) -> None:
        with self._sending:
            self._messages.send(message)

    def report(self, outcome: Outcome) -> None:
        """Tell the supervisor what came of a job."""
        self.send(JobOver(outcome if outcome.error is None else replace(outcome, error=picklable(outcome.error))))

    def listen(self, state: SlotState) -> None:
        """Let requests about jobs arrive there."""
        self._state = state

    def wait_until_woken(self, stop: Stop) -> None:
        """Sleep until the supervisor says that there may be jobs."""
        with stop.interruptible():
            while not self._awake.wait(60):
                pass
        self._awake.clear()

    def _hear(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                order = self._orders.recv()
                if isinstance(order, Wake):
                    self._awake.set()
                elif self._state is not None:
                    self._state.ask(order)
        # The supervisor is gone, however it went.
        os.kill(os.getpid(), signal.SIGTERM)


class Slot:
    """A child process, as its supervisor sees it.

    Parameters
    ----------
    context
        The multiprocessing context; it must fork.
    number : int
        A number that no slot of this worker had before.
    main : callable
        What the child does with its channel, until it has nothing left to do.
    others : list of int
        File descriptors that are not the child's business: those of its siblings.
    bound : bool
        Whether it dies at once with its supervisor; else it gives back first what it has.
    """

    def __init__(
        self, context: Any, number: int, main: Callable[[SlotChannel], None], others: list[int], bound: bool
    ) -> None:
        self.number, self.memory, self.busy = number, SharedMemory(), True
        self.messages, messages_end = context.Pipe(duplex=False)
        orders_end, self._orders = context.Pipe(duplex=False)
        self.output, output_end = os.pipe()
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._rest = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._ooms = _out_of_memory_kills()
        self._memory_taken = 0
        self.ends = [self.messages.fileno(), self._orders.fileno(), self.output]
        supervisor = os.getpid() if bound else None
        arguments = (main, self.memory, messages_end, orders_end, output_end, [*others, *self.ends], supervisor)
        self.process = context.Process(target=_run_slot, args=arguments, daemon=False)
        with _without_stdin():
            self.process.start()
        messages_end.close()
        orders_end.close()
        os.close(output_end)

    def wake(self) -> None:
        """Let it look for jobs."""
        self.busy = True
        self._send(Wake())

    def ask(self, request: Request) -> None:
        """Pass on a request about a job."""
        self._send(request)

    def _send(self, order: Wake | Request) -> None:
        with contextlib.suppress(OSError):
            self._orders.send(order)

    def terminate(self) -> None:
        """Ask it to give back what it has and to end."""
        if self.process.is_alive():
            self.process.terminate()

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()

    def read_output(self, pass_on: Callable[[str], None]) -> bool:
        """Pass on what the slot has printed, line by line; False when there will be no more."""
        data = os.read(self.output, 65536)
        *lines, rest = (self._rest + self._decoder.decode(data, not data)).split("\n")
        if not data and rest:
            lines, rest = [*lines, rest], ""
        self._rest = rest
        for line in lines:
            self._lines.append(line)
            pass_on(line)
        return bool(data)

    def measure(self) -> None:
        """Remember how much memory it takes, in case it is killed for that."""
        with contextlib.suppress(psutil.Error):
            self._memory_taken = psutil.Process(self.process.pid).memory_info().rss

    def story(self) -> str:
        """How it ended: which signal, whether it looks like want of memory, and its last words."""
        code = self.process.exitcode
        if code is not None and code < 0:
            story = f"the process {self.process.pid} was ended by {_signal_name(-code)}"
            if -code == signal.SIGKILL and _out_of_memory_kills() > self._ooms:
                memory = f", having taken {self._memory_taken / 2**20:.0f} MB" if self._memory_taken else ""
                story += f", it looks like the kernel's out-of-memory killer{memory}"
        else:
            story = f"the process {self.process.pid} ended with exit code {code}"
        words = "\n".join(line for line in self._lines if line.strip())
        last = f" Its last words:\n{words}" if words else ""
        return f"{story}.{last}"

    def close(self) -> None:
        self.process.join()
        self.messages.close()
        self._orders.close()
        with contextlib.suppress(OSError):
            os.close(self.output)


class Pool:
    """The slots of one worker.

    Parameters
    ----------
    main : callable
        What a slot does with its channel and its number.
    bound : bool
        Whether the slots die with their supervisor at once, even if they are deep in C code. Defaults to False.
    pass_on : callable
        Called with every line that a slot prints. Defaults to printing it here.
    """

    def __init__(
        self,
        context: Any,
        main: Callable[[SlotChannel, int], None],
        bound: bool = False,
        pass_on: Callable[[str], None] = print,
    ) -> None:
        self.slots: list[Slot] = []
        self._context, self._main, self._bound, self._pass_on = context, main, bound, pass_on
        self._started = 0

    def start_slot(self) -> Slot:
        """Start one more slot."""
        self._started += 1
        number = self._started
        others = [end for slot in self.slots for end in slot.ends]
        slot = Slot(self._context, number, lambda channel: self._main(channel, number), others, self._bound)
        self.slots.append(slot)
        return slot

    def listen(self, timeout: float, also: list[Any] | None = None) -> Iterator[tuple[Slot, Message]]:
        """What the slots say within the timeout, and which of them are gone: `SlotEnded` or `SlotDied`.

        Parameters
        ----------
        also : list, optional
            Other things to wake up for.
        """
        sources: dict[Any, Slot] = {}
        for slot in self.slots:
            sources |= {slot.messages: slot, slot.output: slot, slot.process.sentinel: slot}
        ready = set(wait([*sources, *(also or [])], timeout))
        for slot in list(self.slots):
            ended = slot.process.exitcode is not None
            if slot.output in ready and not ended:
                slot.read_output(self._pass_on)
            if slot.messages in ready or ended:
                yield from self._messages_of(slot)
            if ended:
                # A process that make() started may hold the end of the pipe open, so its end is not waited for.
                while slot.output in wait([slot.output], 0) and slot.read_output(self._pass_on):
                    pass
                self.slots.remove(slot)
                # A slot that ends well has ended its job first.
                has_died = slot.process.exitcode or slot.memory.read()
                yield slot, (SlotDied(slot.story()) if has_died else SlotEnded())
                slot.close()

    def _messages_of(self, slot: Slot) -> Iterator[tuple[Slot, Message]]:
        with contextlib.suppress(EOFError, OSError):
            while slot.messages.poll():
                message = slot.messages.recv()
                if isinstance(message, Log):
                    logger.handle(message.record)
                elif isinstance(message, Told):
                    telemetry.pass_on(message.event)
                else:
                    yield slot, message

    def end(
        self, patience: float, release: Callable[[Slot], Any], hear: Callable[[Slot, Message], None] = lambda *_: None
    ) -> None:
        """Ask all slots to end; kill those that do not in time, and let `release` give back what they had.

        Parameters
        ----------
        hear : callable
            Called with a slot and what it still says.
        """
        for slot in self.slots:
            slot.terminate()
        deadline = time.monotonic() + patience
        while self.slots and time.monotonic() < deadline:
            for slot, message in self.listen(0.1):
                if isinstance(message, SlotDied):
                    self._release(slot, release)
                else:
                    hear(slot, message)
        for slot in list(self.slots):
            slot.kill()
            slot.process.join()
            for _, message in self._messages_of(slot):
                hear(slot, message)
            self._release(slot, release)
            slot.close()
        self.slots.clear()

    @staticmethod
    def _release(slot: Slot, release: Callable[[Slot], Any]) -> None:
        try:
            release(slot)
        except Exception as error:
            logger.warning("The jobs of a slot could not be given back; their lease will end: %s", error)


@contextlib.contextmanager
def _without_stdin() -> Iterator[None]:
    """multiprocessing closes a child's standard input, and waits for ever if a thread here is just reading it."""
    stdin, sys.stdin = sys.stdin, None
    try:
        yield
    finally:
        sys.stdin = stdin


def _run_slot(
    main: Callable[[SlotChannel], None],
    memory: SharedMemory,
    messages: Connection,
    orders: Connection,
    output: int,
    not_its_own: list[int],
    supervisor: int | None,
) -> None:
    if supervisor is not None:
        _die_with(supervisor)
    for end in not_its_own:
        os.close(end)
    sys.stdout.flush()
    sys.stderr.flush()
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    sys.stdin = open(os.devnull)  # noqa: SIM115 - for as long as the process lives
    os.dup2(sys.stdin.fileno(), 0)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    channel = SlotChannel(memory, messages, orders)
    logger.handlers, logger.propagate = [_ToSupervisor(channel)], False
    telemetry.forward_to(lambda event: channel.send(Told(event)))
    try:
        main(channel)
    except (KeyboardInterrupt, SystemExit):
        # The supervisor asked for it or got the same signal; it knows.
        pass
    except Exception as error:
        channel.send(SlotFailed(picklable(error)))
    finally:
        messages.close()


class _ToSupervisor(logging.Handler):
    """Lets the supervisor write the log, so that a line of it is never mixed with what make() prints."""

    def __init__(self, channel: SlotChannel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        record.msg, record.args = record.getMessage(), None
        if record.exc_info:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
            record.exc_info = None
        with contextlib.suppress(OSError):
            self._channel.send(Log(record))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _die_with(supervisor: int) -> None:
    """Let the kernel kill this process when its supervisor is killed, even if it is deep in C code."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
        if os.getppid() != supervisor:
            os._exit(1)


def picklable(error: BaseException) -> BaseException:
    """The error itself if it survives the way to another process, else its words."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        # One that ends the process is to end the other one, too.
        kind = SystemExit if isinstance(error, SystemExit) else DjJobsError
        return kind(f"{type(error).__name__}: {error}")
    return error


def _out_of_memory_kills() -> int:
    """How many processes the kernel has killed for want of memory so far."""
    with contextlib.suppress(OSError, ValueError), open("/proc/vmstat") as file:
        for line in file:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
