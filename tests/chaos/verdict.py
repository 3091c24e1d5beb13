"""What must be true in the end."""

from __future__ import annotations

import calendar
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from chaos import poison
from chaos.options import Options
from chaos.record import Hit, Record

#: How many attempts a job tells of.
_KEPT = 10


@dataclass(frozen=True)
class Recovery:
    """An attempt that a fault explains, and how long after the fault it was recorded; by whole seconds."""

    kind: str
    seconds: float


class Findings(Protocol):
    """What is in the tables in the end; a `Bystander` knows it."""

    def jobs(self) -> list[dict[str, Any]]: ...
    def made(self, name: str) -> list[int]: ...
    def entries(self) -> list[tuple[str, int]]: ...


class Verdict:
    """What is wrong, and how long recoveries took.

    Parameters
    ----------
    calls
        The calls of make() of poison jobs.
    """

    def __init__(self, findings: Findings, record: Record, options: Options, calls: Sequence[poison.Call] = ()) -> None:
        self._record, self._options = record, options
        self.recoveries: list[Recovery] = []
        self._jobs = findings.jobs()
        self._calls = Counter(call.n for call in calls)
        jobs = {
            "Square": list(range(options.numbers)),
            "Twin": list(range(0, options.numbers, 2)),
            "Poison": options.poison,
        }
        succeeded = {(job["table_name"], job["key"]["n"]) for job in self._jobs if job["status"] == "success"}
        # Whether a poison job has succeeded is judged by its kind; here its row must be there, or not.
        results = {**jobs, "Poison": [n for n in jobs["Poison"] if ("__poison", n) in succeeded]}
        self.complaints = [
            *record.complaints,
            *self._about_results(findings, results),
            *self._about_jobs(jobs),
            *(complaint for job in self._jobs for complaint in self._about_job(job)),
        ]

    def _about_results(self, findings: Findings, expected: dict[str, list[int]]) -> Iterator[str]:
        for name, numbers in expected.items():
            made = findings.made(f"__{name.lower()}")
            if made != numbers:
                missing, more = sorted(set(numbers) - set(made))[:20], sorted(set(made) - set(numbers))[:20]
                yield f"{name} has {len(made)} rows; missing: {missing}; too many: {more}"
        entries = Counter(findings.entries())
        for (name, n), count in entries.items():
            if count > 1:
                yield f"{name} {n} was committed {count} times"
        differing = {(name, n) for name, numbers in expected.items() for n in numbers} ^ set(entries)
        if differing:
            yield f"{len(differing)} keys have a result and no entry, or the other way round: {sorted(differing)[:20]}"

    def _about_jobs(self, expected: dict[str, list[int]]) -> Iterator[str]:
        wanted = {(f"__{name.lower()}", n) for name, numbers in expected.items() for n in numbers}
        there = Counter((job["table_name"], job["key"]["n"]) for job in self._jobs)
        if set(there) != wanted or max(there.values(), default=1) > 1:
            yield f"the queue has {sum(there.values())} jobs instead of {len(wanted)}"

    def _about_job(self, job: dict[str, Any]) -> Iterator[str]:
        kind = poison.kind_of(job["key"]["n"]) if job["table_name"] == "__poison" else None
        expected = kind.end if kind else "success"
        if job["status"] != expected and (expected or job["status"] not in ("success", "error")):
            yield f"{_name(job)} is {job['status']}: {job['error_message'][:1000]}"
        yield from self._about_numbers(job)
        if kind is None or kind.end == "success":
            yield from self._about_attempts(job)
        if kind is not None:
            yield from self._about_poison(job, kind)

    def _about_poison(self, job: dict[str, Any], kind: poison.Poison) -> Iterator[str]:
        n = job["key"]["n"]
        if self._calls[n] > poison.MOST_CALLS:
            yield f"make() of {_name(job)} was called {self._calls[n]} times"
        if job["status"] != "error":
            return
        if job["attempt"] != poison.MAX_ATTEMPTS:
            yield f"{_name(job)} is an error after {job['attempt']} attempts instead of {poison.MAX_ATTEMPTS}"
        # A fault may have hit its last attempt.
        if (job["attempts"] or [{}])[-1].get("kind") == "error" and kind.says not in job["error_message"]:
            yield f"{_name(job)} does not say {kind.says!r}: {job['error_message'][:1000]}"

    def _about_numbers(self, job: dict[str, Any]) -> Iterator[str]:
        numbers = [attempt["attempt"] for attempt in job["attempts"] or []]
        if numbers != list(range(1, job["attempt"] + 1))[-_KEPT:]:
            yield f"{_name(job)} has used up {job['attempt']} attempts and tells of {numbers}"

    def _about_attempts(self, job: dict[str, Any]) -> Iterator[str]:
        """Each attempt must have been used up by a fault that happened to its very process: nobody else is robbed."""
        for attempt in job["attempts"] or []:
            # The server's clock may have jumped. The time is cut to whole seconds.
            moments = self._record.moments(_recorded(attempt))
            explain = self._explanation if attempt["kind"] == "crash" else partial(self._excuse, job)
            found = [recovery for moment in moments if (recovery := explain(attempt, moment))]
            if not found:
                message = attempt["message"].splitlines()[0]
                yield f"{_name(job)}: nothing explains attempt {attempt['attempt']} at {attempt['time']}: {message}"
                continue
            recovery = min(found, key=lambda recovery: recovery.seconds)
            self.recoveries.append(recovery)
            if recovery.seconds > self._options.most:
                yield f"{_name(job)} came back after {recovery.seconds:.1f} s ({recovery.kind})"

    def _explanation(self, attempt: dict[str, Any], recorded: float) -> Recovery | None:
        """The fault that the process of an attempt had suffered; of several the one that fits best."""
        named = re.search(r"process (\d+)", attempt["message"])
        pid = int(named.group(1)) if named else 0
        fit = [
            # What comes back too late is late by a second then, too.
            Recovery(
                hit.kind, 0.0 if self._is_new(hit, recorded) else recorded - self._record.since(hit.when, recorded)
            )
            for hit in self._record.hits
            if hit.pid == pid and hit.when - 1 <= recorded
        ]
        return min(fit, key=lambda recovery: recovery.seconds, default=None)

    def _is_new(self, hit: Hit, recorded: float) -> bool:
        """Whether the claim may be from after the fault, by one that goes on or that has just been woken up."""
        return recorded <= hit.until + 1 or -1 <= recorded - hit.woken <= 1 + self._options.heartbeat

    def _excuse(self, job: dict[str, Any], attempt: dict[str, Any], recorded: float) -> Recovery | None:
        """A lost connection is an error if it is lost again and again, in every try that the job had."""
        n = job["key"]["n"] if job["table_name"] == "__square" else job["key"]["n"] // 2
        tries = 3
        within = tries * (self._options.length(n) + self._options.slack)
        faults = [*self._record.cuts, *(spell.since for spell in self._record.spells if spell.is_outage)]
        often = sum(recorded - within <= when <= recorded + 1 for when in faults) >= tries
        is_lost = re.search(r"connection|gone away|server", attempt["message"], re.IGNORECASE)
        return Recovery("lost its connection too often", 0.0) if is_lost and often else None


def _recorded(attempt: dict[str, Any]) -> int:
    return calendar.timegm(time.strptime(attempt["time"], "%Y-%m-%d %H:%M:%S"))


def _name(job: dict[str, Any]) -> str:
    return f"{job['table_name']} {job['key']['n']}"
