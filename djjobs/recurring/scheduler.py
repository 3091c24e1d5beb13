"""The scheduler: of any number, the one that leads a target fires its schedules; another takes over when it dies.

A firing runs in a child process with a connection of its own, so that a slow key_source holds up neither the other
schedules nor the leader's signs of life, and that dies with its scheduler.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import logging
import multiprocessing as mp
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..dj.compat import datajoint_api
from ..errors import DjJobsError
from ..interrupt import Stop
from ..queue.database import Database, explained
from ..settings import settings
from ..telemetry import emit
from ..work.messages import Message, SlotDied, SlotEnded, SlotFailed
from ..work.outcome import describe
from ..work.pool import Pool, Slot, SlotChannel
from .fire import carry_out
from .rows import Firing, Schedule, Timetable, new_token
from .watch import LONGEST_WAIT, Led, Watch

__all__ = ["Scheduler", "SchedulerBeside", "run_scheduler"]

logger = logging.getLogger("djjobs")

#: How long to wait for something to happen: short enough to see a signal coming.
_GLANCE = 0.2
#: How long to wait after the server could not be asked.
_PAUSE = 1.0
_FORGET_INTERVAL = 3600.0
#: How long a child has to end when it is told to, and a scheduler beside a worker.
_PATIENCE = 2.0
#: How long a worker waits before it starts its scheduler again: the first time, and at most.
_FIRST_REST, _LONGEST_REST = 1.0, 60.0


def run_scheduler(tables: Sequence[Any], once: bool = False) -> int:
    """Fire the schedules of these tables, until stopped, and return an exit code.

    Parameters
    ----------
    tables
        Classes with the mixin, upstream first. Schedules that name others are left alone.
    once : bool
        Fire what is due, wait for it to be done, and end. Defaults to False.

    Returns
    -------
    int
        0, or 1 if firings have failed.
    """
    scheduler = Scheduler(tables)
    with Stop() as stop:
        return scheduler.run(stop, once)


@dataclass(frozen=True)
class FiringOver(Message):
    """A firing has ended: "done", "failed" or "lost", and the outcome in words."""

    state: str
    outcome: str


@dataclass
class _Running:
    """A firing, its tables, and the timetable that it is on."""

    timetable: Timetable
    schedule: Schedule
    firing: Firing
    tables: tuple[Any, ...]


class Scheduler:
    """Fires the schedules of some tables, as far as it leads there.

    Parameters
    ----------
    tables
        Classes with the mixin, upstream first. Their connections are closed until the scheduler ends.
    """

    def __init__(self, tables: Sequence[Any]) -> None:
        if not tables:
            raise DjJobsError("There is nothing to watch: no table was given.")
        if "fork" not in mp.get_all_start_methods():
            raise DjJobsError("A scheduler needs a system that can fork.")
        self.id = new_token()
        self._databases = {id(table.connection): Database(table.connection) for table in tables}
        places = {(id(table.connection), table.database): (table.connection, table.database) for table in tables}
        with explained(tables[0].connection, ", ".join(name for _, name in places.values()), "fire the schedules of"):
            timetables = [Timetable.of(*place) for place in places.values()]
            # Each thing is tried once: there is more to do meanwhile, and it will be due again.
            self._own = {
                key: Database(datajoint_api.another_connection(db.connection), tries_to_connect=1, hurried=True)
                for key, db in self._databases.items()
            }
        self._watches = [
            Watch(
                Timetable(timetable.queue.on(self._own[key])),
                [table for table in tables if (id(table.connection), table.database) == (key, database)],
                self.id,
            )
            for timetable, (key, database) in zip(timetables, places, strict=True)
        ]
        self._pool = Pool(mp.get_context("fork"), self._carry_out, bound=True, pass_on=_say)
        self._running: dict[int, _Running] = {}
        self._at_hand: _Running | None = None
        self._next_sign = self._next_forgetting = 0.0
        self._failed = self._faults = 0

    def run(self, stop: Stop, once: bool = False) -> int:
        for db in self._databases.values():
            # An open connection must not be inherited: two processes would read each other's answers.
            db.connection.close()
        logger.info("Scheduler %s watches %s.", self.id, ", ".join(w.timetable.database for w in self._watches))
        try:
            while stop.requested is None:
                self._look()
                if once and not self._running:
                    break
                self._listen(min(_GLANCE, self._until_next()))
        finally:
            self._end()
            stop.take()
        logger.info("Scheduler %s ends.", self.id, extra={"event": "ended"})
        faults = self._faults + sum(watch.faults for watch in self._watches)
        return 1 if self._failed or (once and faults) else 0

    # -- one look at all schemas -----------------------------------------------------------------------------------

    def _look(self) -> None:
        """Do what is due. Does not raise: the next leader is no better off with the same server."""
        for watch in self._watches:
            if time.monotonic() >= watch.next_look:
                with self._forgiving(watch):
                    led = watch.led()
                    self._fire_what_is_due(watch, led)
                    self._take_up_the_lost(watch, led)
        if time.monotonic() >= self._next_forgetting:
            self._next_forgetting = time.monotonic() + _FORGET_INTERVAL
            for watch in self._watches:
                with self._forgiving(watch):
                    watch.timetable.forget_old()
        if time.monotonic() >= self._next_sign:
            self._next_sign = time.monotonic() + settings.leader_expiry / 3
            for watch in self._watches:
                for running in [one for one in self._running.values() if one.timetable is watch.timetable]:
                    with self._forgiving(watch):
                        watch.timetable.keep(running.firing)

    @contextlib.contextmanager
    def _forgiving(self, watch: Watch) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._faults += 1
            db = watch.timetable.queue.db
            words = watch.timetable.database, describe(error).splitlines()[0]
            logger.warning("Schedules of %s wait: %s", *words, exc_info=not db.is_transient(error))
            watch.wait(_PAUSE)
            if db.is_lost(error):
                with contextlib.suppress(Exception):
                    db.start_afresh()

    def _until_next(self) -> float:
        now = time.monotonic()
        return max(0.0, min([self._next_sign, *(watch.next_look for watch in self._watches)]) - now)

    def _take_up_the_lost(self, watch: Watch, led: list[Led]) -> None:
        """Run the firings again whose scheduler died, under the same row."""
        timetable = watch.timetable
        # After a sleep its own look lost too, as long as it has not shown that they run.
        mine = {running.firing.runner for running in self._running.values()}
        known = {one.schedule.name: one for one in led}
        for lost, where in timetable.lost_firings():
            if lost.runner in mine:
                continue
            one = known.get(lost.name)
            if one is None:
                if timetable.find(lost.name) is None:
                    timetable.remove(lost.name)
                continue
            self._alone(watch, one, functools.partial(self._take_up, watch, one, lost, where))

    def _take_up(self, watch: Watch, one: Led, lost: Firing, where: str) -> float:
        firing = watch.timetable.take_up(lost, self.id, one.schedule.target)
        if firing is None:
            return LONGEST_WAIT
        if firing.attempt > settings.max_crashes:
            why = f"its process died {lost.attempt} times, the last time on {where}"
            watch.timetable.end(firing, "failed", f"Given up: {why}.")
            self._failed += 1
            _tell(logging.ERROR, firing, "failed", f"given up, {why}")
            return LONGEST_WAIT
        _tell(logging.WARNING, firing, "taken up", f"taken up again; its process on {where} was lost")
        self._start(_Running(watch.timetable, one.schedule, firing, one.tables))
        return LONGEST_WAIT

    def _fire_what_is_due(self, watch: Watch, led: list[Led]) -> None:
        now = watch.timetable.now()
        # Who waits for a lock of a stranger may lose the lead meanwhile, so that comes last.
        for one in sorted(led, key=lambda one: one.schedule.name in watch.stuck):
            if one.schedule.enabled:
                wait = (one.schedule.next_time - now).total_seconds()
                if wait > 0:
                    watch.wait_at_most(wait)
                else:
                    self._alone(watch, one, functools.partial(self._fire, watch, one, now))

    def _alone(self, watch: Watch, one: Led, act: Callable[[], float]) -> None:
        """Do something about one schedule. Other schedules must not wait for what is wrong with it.

        Parameters
        ----------
        act : callable
            Returns after how many seconds to look at the schedule again.
        """
        name = one.schedule.name
        try:
            watch.wait_at_most(act())
        except (DjJobsError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            watch.complain(one.schedule, describe(error))
        except Exception as error:
            if watch.timetable.queue.db.is_lost(error):
                raise
            self._faults += 1
            watch.wait_at_most(_PAUSE)
            if name not in watch.stuck:
                # Somebody keeps its row locked, perhaps.
                watch.stuck.add(name)
                logger.warning("The schedule %s waits: %s", name, describe(error).splitlines()[0])

    def _fire(self, watch: Watch, one: Led, now: datetime.datetime) -> float:
        schedule = one.schedule
        firing, skipped = watch.timetable.fire(schedule, now, self.id)
        watch.stuck.discard(schedule.name)
        if skipped:
            logger.warning(
                "%s is skipped: %s", schedule.name, skipped, extra={"event": "skipped", "schedule": schedule.name}
            )
        elif firing is not None:
            emit("schedule fired", schedule=firing.name, words=_words(firing, "fired"))
            self._start(_Running(watch.timetable, schedule, firing, one.tables))
        else:
            # Fired by a leader that died then; or somebody changed it just now; or this process was asleep, and does
            # not lead any more.
            watch.doubt()
            return _GLANCE
        return 0.0

    # -- the children ------------------------------------------------------------------------------------------------

    def _start(self, running: _Running) -> None:
        self._at_hand = running
        self._running[self._pool.start_slot().number] = running

    def _carry_out(self, channel: SlotChannel, number: int) -> None:
        """What a child does."""
        # Ctrl-C in a terminal reaches the whole group; it is the scheduler's to decide.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        running = self._at_hand
        assert running is not None
        for db in self._databases.values():
            db.start_afresh()
        key = next(key for key, own in self._own.items() if own is running.timetable.queue.db)
        db = self._databases[key]
        with db.patient(settings.reconnect_timeout, unless=lambda: False):
            timetable = Timetable(running.timetable.queue.on(db))
            channel.send(FiringOver(*carry_out(timetable, running.schedule, running.firing, running.tables)))

    def _listen(self, timeout: float) -> None:
        for slot, message in self._pool.listen(timeout):
            running = self._running[slot.number]
            if isinstance(message, SlotDied):
                self._settle(running, message.story)
            elif isinstance(message, SlotFailed):
                self._settle(running, describe(message.error))
            else:
                self._hear(slot, message)
            if isinstance(message, (SlotEnded, SlotDied)):
                del self._running[slot.number]

    def _hear(self, slot: Slot, message: Message) -> None:
        if isinstance(message, FiringOver):
            self._report(self._running[slot.number].firing, message.state, message.outcome)

    def _report(self, firing: Firing, state: str, outcome: str) -> None:
        self._failed += state == "failed"
        _tell(logging.INFO if state == "done" else logging.ERROR, firing, state, f"{state}: {outcome}")

    def _settle(self, running: _Running, why: str) -> None:
        """A child ended without having recorded what came of its firing."""
        with contextlib.suppress(Exception):
            if running.timetable.end(running.firing, "failed", why):
                self._report(running.firing, "failed", why)

    def _end(self) -> None:
        """End the children, and let another have their firings and the lead at once."""
        self._pool.end(_PATIENCE, self._give_back, self._hear)
        for watch in self._watches:
            with contextlib.suppress(Exception):
                watch.timetable.resign(self.id)
        for db in self._own.values():
            with contextlib.suppress(Exception):
                db.connection.close()

    def _give_back(self, slot: Slot) -> None:
        running = self._running[slot.number]
        running.timetable.give_back(running.firing)


class SchedulerBeside:
    """A scheduler beside a worker: in a process of its own, so that it can never keep the worker waiting.

    Parameters
    ----------
    tables
        Classes with the mixin, whose connections are closed.
    """

    def __init__(self, tables: Sequence[Any]) -> None:
        self._tables = list(tables)
        self._pool = Pool(mp.get_context("fork"), self._run, bound=True, pass_on=_say)
        self._rest, self._next_start = _FIRST_REST, 0.0

    def _run(self, channel: SlotChannel, number: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with Stop(signals=(signal.SIGTERM,)) as stop:
            for connection in {id(table.connection): table.connection for table in self._tables}.values():
                Database(connection).start_afresh()
            Scheduler(self._tables).run(stop)

    def tick(self) -> None:
        """See that it runs, and pass on what it says."""
        if not self._pool.slots and time.monotonic() >= self._next_start:
            self._pool.start_slot()
            self._next_start = time.monotonic() + self._rest
            self._rest = min(self._rest * 2, _LONGEST_REST)
        for _, message in self._pool.listen(0):
            if isinstance(message, SlotDied):
                emit("slot died", story=f"The scheduler of this worker died: {message.story}")
            elif isinstance(message, SlotFailed):
                emit("slot died", story=f"The scheduler of this worker failed: {describe(message.error)}")

    def close(self) -> None:
        self._pool.end(_PATIENCE, lambda slot: None)


def _tell(level: int, firing: Firing, event: str, words: str) -> None:
    logger.log(level, "%s", _words(firing, words), extra={"event": event, "schedule": firing.name})


def _words(firing: Firing, words: str) -> str:
    return f"{firing.name} ({firing.fire_time:%Y-%m-%d %H:%M:%S} UTC) {words}"


def _say(line: str) -> None:
    """What a firing prints."""
    logger.info("%s", line, extra={"event": "output"})
