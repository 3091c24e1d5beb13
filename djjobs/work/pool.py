"""The pool: child processes, called slots, and what their supervisor sees of them.

They are forked, so that classes defined in a notebook work, and not daemonic, so that make() may start
processes of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from typing import Any

import psutil

from .. import telemetry
from . import job_control
from .messages import End, Log, Message, Request, Signalled, SlotDied, SlotEnded, Told, Wake
from .plain_data import from_bytes
from .shared_memory import SharedMemory
from .slot_output import SlotOutput
from .slot_process import SlotChannel, run_slot

__all__ = ["Pool", "Slot", "SlotChannel"]

logger = logging.getLogger("djjobs")

#: How long a slot that has closed its pipes may take to end.
_LAST_MOMENT = 2.0
#: A signal to a slot may be meant for the whole worker. So much later its supervisor has got it as well.
_SAME_SIGNAL = 0.6


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
        self.printed = SlotOutput(self.output)
        self._ooms = _out_of_memory_kills()
        self._memory_taken = 0
        self.ends = [self.messages.fileno(), self._orders.fileno(), self.output]
        #: What will never have anything to say again, though the process is there.
        self._silent: set[Any] = set()
        self._silent_since: float | None = None
        #: When somebody signalled it, and the job that it was running.
        self.signalled: tuple[float, Signalled] | None = None
        supervisor = os.getpid() if bound else None
        arguments = (main, self.memory, messages_end, orders_end, output_end, [*others, *self.ends], supervisor)
        self.process = context.Process(target=run_slot, args=arguments, daemon=False)
        with _without_stdin():
            self.process.start()
        messages_end.close()
        orders_end.close()
        os.close(output_end)
        # The slot does the same. Whoever is first, nobody signals a group that is not there yet.
        with contextlib.suppress(OSError):
            os.setpgid(self.group, self.group)

    @property
    def group(self) -> int:
        """The number of its process, and of the group of all that make() starts there."""
        assert self.process.pid is not None
        return self.process.pid

    def wake(self) -> None:
        """Let it look for jobs."""
        self.busy = True
        self._send(Wake())

    def ask(self, request: Request) -> None:
        """Pass on a request about a job."""
        self._send(request)

    def _send(self, order: End | Request | Wake) -> None:
        with contextlib.suppress(OSError):
            self._orders.send(order)

    def terminate(self) -> None:
        """Ask it to give back what it has and to end."""
        self._send(End())
        if not self.has_ended():
            # Wakes up what sleeps; and what does not listen to orders, heeds it.
            os.kill(self.group, signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, with all that make() has started there and has not detached."""
        if not self.has_ended():
            self.kill_group()

    def kill_group(self) -> None:
        """Kill the process and its group. The number of the group is nobody else's before the process was joined."""
        with contextlib.suppress(OSError):
            os.killpg(self.group, signal.SIGKILL)

    def has_ended(self) -> bool:
        """Whether it has ended. The kernel still remembers it afterwards."""
        try:
            return os.waitid(os.P_PID, self.group, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    @property
    def sources(self) -> list[Any]:
        """What to wake up for: what it says or prints, and its end."""
        return [end for end in (self.messages, self.output, self.process.sentinel) if end not in self._silent]

    def falls_silent(self, end: Any) -> None:
        """One of its pipes is closed. Ready for ever, it would keep its supervisor busy if the process goes on."""
        self._silent.add(end)
        if end is not self.output and self._silent_since is None:
            self._silent_since = time.monotonic()

    @property
    def is_cut_off(self) -> bool:
        """Whether it can say nothing any more, and has not ended either."""
        return self._silent_since is not None and time.monotonic() - self._silent_since > _LAST_MOMENT

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
        words = self.printed.last_words
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
        #: Whether the worker was told to stop. Then a signal to a slot means no more than that.
        self.is_stopping = False

    def start_slot(self) -> Slot:
        """Start one more slot."""
        if not self._started:
            job_control.follow(self._groups)
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
        ready = set(wait([*(end for slot in self.slots for end in slot.sources), *(also or [])], timeout))
        for slot in list(self.slots):
            ended = slot.has_ended()
            if ended:
                # While the kernel still remembers it: its number could be another's after that.
                slot.kill_group()
                slot.process.join()
            if slot.output in ready and not ended and not slot.printed.read(self._pass_on):
                slot.falls_silent(slot.output)
            if slot.messages in ready or ended:
                yield from self._messages_of(slot)
            if ended:
                self.slots.remove(slot)
                # A process that make() has detached may hold the end of the pipe open, so its end is not waited for.
                slot.printed.read_all(self._pass_on)
                # A slot that ends well has ended its job first, and holds nothing.
                has_died = slot.process.exitcode or slot.memory.may_hold
                yield slot, (SlotDied(slot.story()) if has_died else SlotEnded())
                slot.close()
            else:
                if slot.process.sentinel in ready:
                    slot.falls_silent(slot.process.sentinel)
                self._look_after(slot)

    def _messages_of(self, slot: Slot) -> Iterator[tuple[Slot, Message]]:
        try:
            while slot.messages.poll():
                message = self._understand(slot.messages.recv_bytes())
                if isinstance(message, Log):
                    logger.handle(message.record)
                elif isinstance(message, Told):
                    telemetry.pass_on(message.event)
                elif isinstance(message, Signalled):
                    slot.signalled = time.monotonic(), message
                elif message is not None:
                    yield slot, message
        except (EOFError, OSError):
            slot.falls_silent(slot.messages)

    @staticmethod
    def _understand(data: bytes) -> Any:
        try:
            return from_bytes(data)
        except ValueError as error:
            logger.warning("A slot has sent %s", error)
            return None

    def _look_after(self, slot: Slot) -> None:
        if slot.is_cut_off:
            logger.error("The process %s has closed its pipes and does not end; it is killed.", slot.process.pid)
            slot.kill()
        if slot.signalled is not None and time.monotonic() - slot.signalled[0] > _SAME_SIGNAL:
            signalled, slot.signalled = slot.signalled[1], None
            if not self.is_stopping:
                slot.ask(Request("signal", signalled.key_hash, signalled.claim))

    def end(
        self, patience: float, release: Callable[[Slot], Any], hear: Callable[[Slot, Message], None] = lambda *_: None
    ) -> None:
        """Ask all slots to end; kill those that do not in time, and let `release` give back what they had.

        Parameters
        ----------
        hear : callable
            Called with a slot and what it still says.
        """
        self.is_stopping = True
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
            slot.kill_group()
            slot.process.join()
            for _, message in self._messages_of(slot):
                hear(slot, message)
            self._release(slot, release)
            slot.close()
        self.slots.clear()
        job_control.unfollow(self._groups)

    def _groups(self) -> list[int]:
        return [slot.group for slot in self.slots if not slot.has_ended()]

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


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _out_of_memory_kills() -> int:
    """How many processes the kernel has killed for want of memory so far."""
    with contextlib.suppress(OSError, ValueError), open("/proc/vmstat") as file:
        for line in file:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
