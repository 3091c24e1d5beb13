"""What must be true in the end."""

from __future__ import annotations

import calendar
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from chaos.faults import Hit, Record
from chaos.options import Options
from chaos.server import Bystander

#: How many attempts a job tells of.
_KEPT = 10


@dataclass(frozen=True)
class Recovery:
    """An attempt that a fault explains, and how long after the fault it was recorded; by whole seconds."""

    kind: str
    seconds: float


class Verdict:
    """What is wrong, and how long recoveries took."""

    def __init__(self, bystander: Bystander, record: Record, options: Options) -> None:
        self._record, self._options = record, options
        self.recoveries: list[Recovery] = []
        self._jobs = bystander.jobs()
        expected = {"Square": list(range(options.numbers)), "Twin": list(range(0, options.numbers, 2))}
        self.complaints = [
            *record.complaints,
            *self._about_results(bystander, expected),
            *self._about_jobs(expected),
            *(complaint for job in self._jobs for complaint in self._about_attempts(job)),
        ]

    def _about_results(self, bystander: Bystander, expected: dict[str, list[int]]) -> Iterator[str]:
        for name, numbers in expected.items():
            made = bystander.made(f"__{name.lower()}")
            if made != numbers:
                yield f"{name} has {len(made)} rows; missing: {sorted(set(numbers) - set(made))[:20]}"
        entries = Counter(bystander.entries())
        for (name, n), count in entries.items():
            if count > 1:
                yield f"{name} {n} was committed {count} times"
        missing = {(name, n) for name, numbers in expected.items() for n in numbers} ^ set(entries)
        if missing:
            yield f"{len(missing)} keys have a result and no entry, or the other way round: {sorted(missing)[:20]}"

    def _about_jobs(self, expected: dict[str, list[int]]) -> Iterator[str]:
        for job in self._jobs:
            if job["status"] != "success":
                yield f"{_name(job)} is {job['status']}: {job['error_message']}"
        wanted = {(f"__{name.lower()}", n) for name, numbers in expected.items() for n in numbers}
        there = Counter((job["table_name"], job["key"]["n"]) for job in self._jobs)
        if set(there) != wanted or max(there.values(), default=1) > 1:
            yield f"the queue has {sum(there.values())} jobs instead of {len(wanted)}"

    def _about_attempts(self, job: dict[str, Any]) -> Iterator[str]:
        attempts = job["attempts"] or []
        numbers = [attempt["attempt"] for attempt in attempts]
        if numbers != list(range(1, job["attempt"] + 1))[-_KEPT:]:
            yield f"{_name(job)} has used up {job['attempt']} attempts and tells of {numbers}"
        for attempt in attempts:
            recovery = self._explanation(attempt) if attempt["kind"] == "crash" else self._excuse(job, attempt)
            if recovery is None:
                message = attempt["message"].splitlines()[0]
                yield f"{_name(job)}: nothing explains attempt {attempt['attempt']} at {attempt['time']}: {message}"
            else:
                self.recoveries.append(recovery)
                if recovery.seconds > self._options.most:
                    yield f"{_name(job)} came back after {recovery.seconds:.1f} s ({recovery.kind})"

    def _explanation(self, attempt: dict[str, Any]) -> Recovery | None:
        """The fault that the process of an attempt had suffered; of several the one that fits best."""
        named = re.search(r"process (\d+)", attempt["message"])
        pid = int(named.group(1)) if named else 0
        # The time is cut to whole seconds; what comes back too late is late by a second then, too.
        recorded, since = _recorded(attempt), self._record.since
        fit = [
            Recovery(hit.kind, 0.0 if self._is_new(hit, recorded) else recorded - since(hit.when, recorded))
            for hit in self._record.hits
            if hit.pid == pid and hit.when - 1 <= recorded
        ]
        return min(fit, key=lambda recovery: recovery.seconds, default=None)

    def _is_new(self, hit: Hit, recorded: int) -> bool:
        """Whether the claim may be from after the fault, by one that goes on or that has just been woken up."""
        return recorded <= hit.until + 1 or -1 <= recorded - hit.woken <= 1 + self._options.heartbeat

    def _excuse(self, job: dict[str, Any], attempt: dict[str, Any]) -> Recovery | None:
        """A lost connection is an error if it is lost again and again, in every try that the job had."""
        n = job["key"]["n"] if job["table_name"] == "__square" else job["key"]["n"] // 2
        recorded, tries = _recorded(attempt), 3
        within = tries * (self._options.length(n) + self._options.slack)
        faults = [*self._record.cuts, *(down for down, _ in self._record.outages)]
        often = sum(recorded - within <= when <= recorded + 1 for when in faults) >= tries
        is_lost = re.search(r"connection|gone away|server", attempt["message"], re.IGNORECASE)
        return Recovery("lost its connection too often", 0.0) if is_lost and often else None


def _recorded(attempt: dict[str, Any]) -> int:
    return calendar.timegm(time.strptime(attempt["time"], "%Y-%m-%d %H:%M:%S"))


def _name(job: dict[str, Any]) -> str:
    return f"{job['table_name']} {job['key']['n']}"
