"""The lines of the log: the first subscriber to what happens."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from .printable import in_log, one_line
from .telemetry import Event, subscribe

__all__ = ["write_log_lines"]

logger = logging.getLogger("djjobs")
#: Where DataJoint tells of errors that a populate is to suppress, and where labs look for them.
_datajoint = logging.getLogger("datajoint")


def write_log_lines() -> None:
    """Write a line into the log for every event, from now on."""
    logger.addFilter(_make_printable)
    subscribe(_write, direct=True, when=_is_written)


def _make_printable(record: logging.LogRecord) -> bool:
    """Whoever writes to our logger, and whoever shows what it writes: no control character gets through."""
    record.msg, record.args = in_log(record.getMessage()), None
    if record.exc_info and not record.exc_text:
        record.exc_text = logging.Formatter().formatException(record.exc_info)
    if record.exc_text:
        record.exc_text = in_log(f"\n{record.exc_text}").strip("\n")
    return True


def _is_written(name: str) -> bool:
    level = _LINES[name][0]
    # The level of a failure depends on who handles it.
    return callable(level) or logger.isEnabledFor(level)


def _write(event: Event) -> None:
    level, words = _LINES[event.name]
    chosen = level(event) if callable(level) else level
    if logger.isEnabledFor(chosen):
        logger.log(chosen, "%s", words(event), extra=_extra(event))
    if event.name == "job failed" and event.details.get("suppressed"):
        _datajoint.error("%s %s: %s", event.table, event.key, in_log(event.details["message"]))


def _extra(event: Event) -> dict[str, Any]:
    """What a line tells besides its words, as in JSON."""
    facts = {
        "event": event.name,
        "table": event.table or None,
        "key": event.key,
        "attempt": event.attempt,
        "seconds": None if event.duration is None else round(event.duration, 3),
        "waited": None if event.waited is None else round(event.waited, 3),
        **{name: event.details[name] for name in ("run_id", "worker", "schedule") if name in event.details},
    }
    return {name: value for name, value in facts.items() if value is not None}


def _job(words: str) -> Callable[[Event], str]:
    return lambda event: f"{event.table} {event.key} {words}"


def _done(event: Event) -> str:
    what = "done" if event.details["made"] else "was done already"
    return f"{event.table} {event.key} {what} in {event.duration or 0:.2f} s"


def _failed(event: Event) -> str:
    message, again = _first_line(event.details["message"]), event.details["retry_in"]
    tried_again = "" if again is None else f"; tried again in {again:.0f} s"
    return f"{event.table} {event.key} failed in {event.duration or 0:.2f} s: {message}{tried_again}"


def _of_failure(event: Event) -> int:
    """An error that a populate raises, or tells where DataJoint does, is no second error here."""
    return logging.INFO if event.details.get("suppressed") is not None else logging.ERROR


def _recovered(event: Event) -> str:
    return f"{event.table} {event.key}: {event.details['message']} It is {event.details['status']} now."


def _run_ended(event: Event) -> str:
    details = event.details
    name = f" ({details['run_name']})" if details["run_name"] else ""
    return f"Run {details['run_id']}{name} of {event.table} is {details['state']}: {details['progress']}."


def _run_begun(event: Event) -> str:
    return f"Run {event.details['run_id']} of {event.table} begins: {event.details['count']} jobs."


def _worker_started(event: Event) -> str:
    return f"Worker {event.details['worker']} works on {event.details['tables']}."


def _worker_ended(event: Event) -> str:
    details = event.details
    return f"Worker {details['worker']} ends: {details['done']} jobs done, {details['failed']} failed."


def _scheduled(event: Event) -> str:
    return f"{event.table}: {event.details['count']} jobs scheduled"


def _cleaned_up(event: Event) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in event.details["counts"].items() if count)
    return f"{event.table} cleaned up: {counts or 'nothing to do'}"


def _first_line(text: str) -> str:
    return one_line(text.split("\n", 1)[0].rstrip())


def _detail(name: str) -> Callable[[Event], str]:
    return lambda event: str(event.details[name])


#: Of every event the level of its line, and the words.
_LINES: dict[str, tuple[int | Callable[[Event], int], Callable[[Event], str]]] = {
    "job claimed": (logging.DEBUG, _job("claimed")),
    "job started": (logging.INFO, _job("started")),
    "job done": (logging.INFO, _done),
    "job failed": (_of_failure, _failed),
    "job retried": (logging.WARNING, _failed),
    "job cancelled": (logging.INFO, _job("cancelled")),
    "job given back": (logging.DEBUG, _job("given back")),
    "job lost": (logging.WARNING, _job("was given to another")),
    "job recovered": (logging.WARNING, _recovered),
    "slot died": (logging.ERROR, _detail("story")),
    "worker started": (logging.INFO, _worker_started),
    "worker heard": (logging.DEBUG, lambda event: f"Worker {event.details['worker']} is alive."),
    "worker stopping": (logging.INFO, _detail("why")),
    "worker ended": (logging.INFO, _worker_ended),
    "worker died": (logging.INFO, lambda event: f"Worker {event.details['worker']} died: {event.details['story']}"),
    "run begun": (logging.DEBUG, _run_begun),
    "run ended": (logging.INFO, _run_ended),
    "schedule fired": (logging.INFO, _detail("words")),
    "table scheduled": (logging.DEBUG, _scheduled),
    "table cleaned up": (logging.DEBUG, _cleaned_up),
}
