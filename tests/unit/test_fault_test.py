"""The fault test itself: its plan, and whether its verdict sees what is wrong."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from chaos import poison
from chaos.options import Options
from chaos.plan import JUMPS, KINDS, OUTAGES, SPELLS, WEIGHTS, plan
from chaos.record import Hit, Record, Spell
from chaos.verdict import Verdict

OPTIONS = Options(1, jobs=6)
NOW = 1_750_000_000.0
#: The id of a process.
WORKER = 4711


# -- the plan ----------------------------------------------------------------------------------------------


def kinds(seed: int, seconds: float, *only: str) -> list[str]:
    return [fault.kind for fault in plan(seed, seconds, only)]


def test_the_same_seed_makes_the_same_faults() -> None:
    assert plan(7, 20) == plan(7, 20)
    assert plan(7, 20) != plan(8, 20)


@pytest.mark.parametrize("seed", range(5))
def test_everything_happens_in_a_long_run(seed: int) -> None:
    assert {*kinds(seed, 90), "poison"} == set(KINDS)


@pytest.mark.parametrize("seed", range(5))
def test_a_short_run_has_a_sample_of_what_can_happen_to_the_server(seed: int) -> None:
    happens = kinds(seed, 20)
    assert set(WEIGHTS) <= set(happens)
    assert [sum(kind in some for kind in happens) for some in (OUTAGES, SPELLS, JUMPS)] == [1, 1, 1]


def test_all_samples_occur() -> None:
    assert {kind for seed in range(50) for kind in kinds(seed, 20)} == set(KINDS) - {"poison"}


@pytest.mark.parametrize("seed", range(5))
def test_there_is_time_for_one_spell_before_the_next(seed: int) -> None:
    times = [fault.at for fault in plan(seed, 90) if fault.kind in (*OUTAGES, *SPELLS)]
    assert min(after - before for before, after in itertools.pairwise(times)) > 1.5 * OPTIONS.suspension


def test_a_run_can_have_one_kind_of_fault_only() -> None:
    assert kinds(1, 20, "stall server") == ["stall server"]
    assert Options(1, only=("stall server",)).poison == []


# -- the verdict ---------------------------------------------------------------------------------------------


@dataclass
class Findings:
    """What is in the tables: all as it should be, unless a test says otherwise."""

    changes: dict[int, dict[str, Any]] = field(default_factory=dict)
    table: str = "__square"

    def jobs(self) -> list[dict[str, Any]]:
        jobs = [("__square", n) for n in range(4)] + [("__twin", n) for n in (0, 2)]
        if self.table == "__poison":
            jobs += [("__poison", n) for n in self.changes]
        usual = {"status": "success", "attempt": 0, "attempts": None, "error_message": ""}
        rows = [{**usual, "table_name": table, "key": {"n": n}} for table, n in jobs]
        return [{**row, **self._changes(row)} for row in rows]

    def _changes(self, row: dict[str, Any]) -> dict[str, Any]:
        return self.changes.get(row["key"]["n"], {}) if row["table_name"] == self.table else {}

    def made(self, name: str) -> list[int]:
        done = [job for job in self.jobs() if job["table_name"] == name and job["status"] == "success"]
        return [job["key"]["n"] for job in done]

    def entries(self) -> list[tuple[str, int]]:
        names = {"__square": "Square", "__twin": "Twin", "__poison": "Poison"}
        return [(names[table], n) for table in names for n in self.made(table)]


def attempts(
    *kinds: str, at: float = NOW, message: str = f"the worker on lab (process {WORKER}) died"
) -> dict[str, Any]:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
    told = [{"attempt": number, "kind": kind, "time": when, "message": message} for number, kind in enumerate(kinds, 1)]
    return {"attempt": len(told), "attempts": told}


def complaints(findings: Findings, record: Record | None = None, **more: Any) -> list[str]:
    return Verdict(findings, record or Record(), OPTIONS, **more).complaints


def killed(when: float, **more: Any) -> Record:
    return Record(hits=[Hit(WORKER, "kill worker", when)], **more)


def test_nothing_is_wrong_if_all_is_done() -> None:
    assert complaints(Findings()) == []


def test_a_job_that_is_left_is_seen() -> None:
    assert any("is reserved" in complaint for complaint in complaints(Findings({1: {"status": "reserved"}})))


def test_a_job_taken_from_a_worker_that_nothing_happened_to_is_seen() -> None:
    (complaint,) = complaints(Findings({1: attempts("crash")}))
    assert "nothing explains attempt 1" in complaint


@pytest.mark.parametrize("kind", SPELLS)
def test_a_spell_of_the_server_explains_no_lost_job(kind: str) -> None:
    record = Record(spells=[Spell(kind, NOW - 10, NOW - 1)])
    assert any("nothing explains" in complaint for complaint in complaints(Findings({1: attempts("crash")}), record))


def test_a_jump_of_the_clock_explains_no_lost_job() -> None:
    record = Record(offsets=[(0.0, 0.0), (NOW - 5, 300.0)])
    told = Findings({1: attempts("crash", at=NOW + 300)})
    assert any("nothing explains" in complaint for complaint in complaints(told, record))


def test_a_fault_explains_a_lost_job_of_its_process_and_of_no_other() -> None:
    assert complaints(Findings({1: attempts("crash")}), killed(NOW - 4)) == []
    other = attempts("crash", message="the worker on lab (process 1) died")
    assert complaints(Findings({1: other}), killed(NOW - 4))


def test_a_recovery_that_takes_too_long_is_seen() -> None:
    assert any(
        "came back after" in complaint for complaint in complaints(Findings({1: attempts("crash")}), killed(NOW - 20))
    )


def test_nobody_is_recovered_during_a_spell_but_in_time_after_it() -> None:
    lost = Findings({1: attempts("crash")})
    assert complaints(lost, killed(NOW - 20, spells=[Spell("stall server", NOW - 18, NOW - 6)])) == []
    assert complaints(lost, killed(NOW - 40, spells=[Spell("stall server", NOW - 38, NOW - 20)]))


@pytest.mark.parametrize("jump", (300.0, -300.0))
def test_times_by_a_clock_that_jumped_are_understood(jump: float) -> None:
    """The server says when an attempt was used up, by the clock that it had then."""
    record = killed(NOW - 4, offsets=[(0.0, 0.0), (NOW - 5, jump), (NOW + 5, 0.0)])
    assert complaints(Findings({1: attempts("crash", at=NOW + jump)}), record) == []
    late = killed(NOW - 20, offsets=[(0.0, 0.0), (NOW - 5, jump), (NOW + 5, 0.0)])
    assert any("came back after 20" in one for one in complaints(Findings({1: attempts("crash", at=NOW + jump)}), late))


def test_attempts_that_do_not_add_up_are_seen() -> None:
    told = {**attempts("crash"), "attempt": 2}
    assert any("has used up 2 attempts" in one for one in complaints(Findings({1: told}), killed(NOW - 4)))


def test_a_refusal_of_the_server_explains_no_attempt() -> None:
    told = attempts("error", message="OperationalError: the server is running with --read-only")
    record = Record(spells=[Spell("read-only spell", NOW - 10, NOW)])
    assert any("nothing explains" in complaint for complaint in complaints(Findings({1: told}), record))


# -- poison ------------------------------------------------------------------------------------------------------


def number_of(name: str) -> int:
    return next(n for n in range(10_000) if (kind := poison.kind_of(n)) and kind.name == name)


def about_poison(name: str, told: dict[str, Any], calls: int = 2) -> list[str]:
    n = number_of(name)
    verdict = Verdict(Findings({n: told}, "__poison"), Record(), OPTIONS, [poison.Call(1, 1, n)] * calls)
    return [complaint for complaint in verdict.complaints if f"__poison {n}" in complaint]


def failed(*kinds: str, says: str) -> dict[str, Any]:
    return {"status": "error", **attempts(*kinds), "error_message": says}


def test_poison_ends_as_an_error_after_all_its_attempts() -> None:
    assert about_poison("doom", failed("error", "error", says="Doom: neither nor")) == []
    assert about_poison("doom", failed("error", says="Doom: neither nor"))
    assert about_poison("doom", failed("error", "error", says="DjJobsError: lost"))
    assert about_poison("doom", {"status": "scheduled"})
    assert about_poison("doom", {"status": "success"})


def test_poison_that_loops_is_seen() -> None:
    assert about_poison("doom", failed("error", "error", says="Doom: neither nor"), calls=poison.MOST_CALLS + 1)


def test_odd_jobs_that_are_right_succeed_without_an_attempt() -> None:
    assert about_poison("thread", {"status": "success"}) == []
    assert about_poison("thread", {"status": "success", **attempts("crash")})
    assert about_poison("thread", failed("error", "error", says=""))


def test_of_twins_either_end_is_right() -> None:
    assert about_poison("twins", {"status": "success"}) == []
    assert about_poison("twins", failed("crash", "error", says="lost")) == []
    assert about_poison("twins", {"status": "reserved"})
