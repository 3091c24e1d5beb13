"""A populate in several processes: each slot claims for itself; the parent keeps watch and adds up the reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..interrupt import Stop
from ..queue.finish import Finisher
from ..queue.identity import Claimant
from ..settings import settings
from .budget import Budget
from .execute import Outcome, clean_up_after
from .loop import MakeFailed
from .monitor import Burial, Keeper
from .pool import Crew, Death, SlotLine

__all__ = ["work_in_processes"]


def work_in_processes(
    context: Any,
    count: int,
    finisher: Finisher,
    claimant: Claimant,
    work: Callable[[SlotLine, int], None],
    report: Callable[[Outcome], None],
    budget: Budget,
    suppress_errors: bool,
) -> None:
    """Do the work in `count` child processes.

    Parameters
    ----------
    context
        The multiprocessing context; it must fork.
    work
        What a slot does, given its line and its number, until nothing is left.
    report
        Called in this process with every outcome.
    budget
        What the slots spend together.
    """
    db = finisher.queue.db
    keeper = Keeper(claimant, [finisher], count)
    keeper.enter()
    # An open connection must not be inherited by a slot, which would close it: it is for this process to use again
    # when all slots are gone.
    db.connection.close()

    def slot(line: SlotLine, number: int) -> None:
        db.start_afresh()
        try:
            work(line, number)
        finally:
            db.connection.close()

    crew = Crew(context, slot)
    uncleaned: list[Burial] = []
    try:
        with Stop() as signals:
            for _ in range(count):
                crew.hire()
            while crew.slots:
                keeper.tick(crew.slots)
                for member, message in crew.listen(0.5):
                    if isinstance(message, Outcome):
                        report(message)
                    elif isinstance(message, Death):
                        burial = keeper.bury(member, member.story())
                        budget.put_back(burial.released)
                        if burial.status == "cancelled":
                            uncleaned.append(burial)
                        _settle(burial, report, suppress_errors)
                        crew.hire()
                    elif isinstance(message, BaseException):
                        raise message
                signals.check()
    except BaseException as error:
        budget.spend_all()
        if isinstance(error, MakeFailed):
            _finish(crew, report)
        raise
    finally:
        crew.end(settings.grace, keeper.give_back)
        keeper.leave()
        keeper.db.connection.close()
        db.reconnect()
        for burial in uncleaned:
            clean_up_after(burial.table, burial.job.key if burial.job else {})


def _finish(crew: Crew, report: Callable[[Outcome], None]) -> None:
    """An error ends the work: no slot begins another job, but each ends the one it has."""
    while crew.slots:
        for _, message in crew.listen(0.5):
            if isinstance(message, Outcome):
                report(message)


def _settle(burial: Burial, report: Callable[[Outcome], None], suppress_errors: bool) -> None:
    """A slot died; if its job is an error now, treat it as one."""
    if burial.job is not None and burial.status == "error":
        report(Outcome(burial.job.key, made=False, error=burial.error, message=burial.failure.message))
        if not suppress_errors:
            raise MakeFailed(burial.error)
