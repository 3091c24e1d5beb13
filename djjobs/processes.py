"""Working in several processes: each child claims for itself; the parent adds up what they report.

The children are forked, so that classes defined in a notebook work, and not daemonic, so that
make() may start processes of its own.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

from .errors import DjJobsError
from .executing import Outcome
from .keys import Keys
from .queue import Queue
from .stopping import Stop, start_thread
from .working import MakeFailed

__all__ = ["work_in_processes"]

#: What a child runs: given a way to report, it works until there is nothing left.
Work = Callable[[Callable[[Outcome], None]], None]


def work_in_processes(
    context: Any,
    count: int,
    queue: Queue,
    keys: Keys,
    work: Work,
    report: Callable[[Outcome], None],
    stop: Callable[[], None],
) -> None:
    """Do the work in `count` child processes.

    Parameters
    ----------
    context
        The multiprocessing context; it must fork.
    report
        Called in this process with every outcome.
    stop
        Called when an error ends the work: no child is to begin another job.
    """
    # An open connection must not be inherited: two processes would read each other's answers.
    queue.db.connection.close()
    children: list[_Child] = []
    for _ in range(count):
        children.append(_Child(context, queue, work, [end for child in children for end in child.ends]))
    try:
        queue.db.start_afresh()
        with Stop() as signals, signals.interruptible():
            _listen(children, report)
    except BaseException as error:
        stop()
        if not isinstance(error, MakeFailed):
            for child in children:
                child.stop()
        raise
    finally:
        for child in children:
            child.process.join()
    _insist_on_clean_exits(keys, children)


class _Child:
    """A child process and the two pipes to it: what it reports, and whether the parent still lives."""

    def __init__(self, context: Any, queue: Queue, work: Work, of_siblings: list[Connection]) -> None:
        self.reports, child_reports = context.Pipe(duplex=False)
        child_lifeline, self._lifeline = context.Pipe(duplex=False)
        self.ends = [self.reports, self._lifeline]
        not_its_own = [*of_siblings, *self.ends]
        self.process = context.Process(
            target=_run_child, args=(queue, work, child_reports, child_lifeline, not_its_own), daemon=False
        )
        self.process.start()
        child_reports.close()
        child_lifeline.close()

    def stop(self) -> None:
        if self.process.is_alive():
            self.process.terminate()


def _listen(children: list[_Child], report: Callable[[Outcome], None]) -> None:
    talking = {child.reports: child for child in children}
    while talking:
        # A process that make() started may hold a dead child's end of the pipe open, so the end is not waited for.
        gone = [reports for reports, child in talking.items() if child.process.exitcode is not None]
        for ready in {*wait(list(talking), timeout=0.5), *gone}:
            assert isinstance(ready, Connection)
            try:
                message = ready.recv() if ready not in gone or ready.poll() else None
            except EOFError:
                message = None
            if message is None:
                del talking[ready]
            elif isinstance(message, BaseException):
                raise message
            else:
                report(message)


def _insist_on_clean_exits(keys: Keys, children: list[_Child]) -> None:
    killed = [child.process for child in children if child.process.exitcode != 0]
    if killed:
        codes = ", ".join(_exit_story(process.exitcode) for process in killed)
        raise DjJobsError(
            f"{len(killed)} of {len(children)} processes that worked on {keys.label} died ({codes}). "
            f"Their jobs are still reserved: see {type(keys.table).__name__}.jobs.reserved."
        )


def _exit_story(code: int | None) -> str:
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def _run_child(
    queue: Queue, work: Work, reports: Connection, lifeline: Connection, not_its_own: list[Connection]
) -> None:
    for end in not_its_own:
        end.close()
    _end_with_parent(lifeline)
    queue.db.start_afresh()
    try:
        work(lambda outcome: reports.send(_picklable(outcome)))
    except (KeyboardInterrupt, SystemExit):
        # The parent asked for it or got the same signal; it knows.
        pass
    except MakeFailed as failed:
        reports.send(MakeFailed(_picklable_error(failed.error)))
    except Exception as error:
        reports.send(_picklable_error(error))
    finally:
        reports.close()
        with suppress(Exception):
            queue.db.connection.close()


def _end_with_parent(lifeline: Connection) -> None:
    """Ask this process to stop when the parent is gone, however it went."""

    def watch() -> None:
        with suppress(EOFError, OSError):
            lifeline.recv()
        os.kill(os.getpid(), signal.SIGTERM)

    start_thread(watch)


def _picklable(outcome: Outcome) -> Outcome:
    if outcome.error is None:
        return outcome
    return replace(outcome, error=_picklable_error(outcome.error))


def _picklable_error(error: Exception) -> Exception:
    """The error itself if it survives the way to another process, else its words."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return DjJobsError(f"{type(error).__name__}: {error}")
    return error
