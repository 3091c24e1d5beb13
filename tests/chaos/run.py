"""The fault test, once or for as long as one likes: `make chaos`, or `python tests/chaos/run.py --help`."""

from __future__ import annotations

import argparse
import os
import random
import re
import secrets
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chaos import poison
from chaos.faults import Mayhem
from chaos.options import Options
from chaos.plan import KINDS, Fault, plan
from chaos.record import Record, Spell
from chaos.server import Bystander, environment
from chaos.spells import Spells
from chaos.verdict import Recovery, Verdict
from chaos.watch import Watch
from chaos.workers import End, WorkerPool

#: How long a worker may take to leave, by the promise that it makes, before the slack.
LEAVING = 10.0
#: In a traceback: a populate that was beyond its beginning.
_AT_WORK = re.compile(r"/djjobs/work/loop\.py\", line \d+, in run\b")
#: What a worker says at its end.
_HAS_FAILED = re.compile(r"^.* ends: \d+ jobs? done, [1-9]\d* failed", re.M)
#: What a worker says that could not remove its row.
_NOT_SIGNED_OFF = "could not sign off"
#: After so many it is no use to go on.
_MOST_COMPLAINTS = 100


@dataclass
class Report:
    """What came of a run."""

    options: Options
    faults: list[Fault]
    complaints: list[str] = field(default_factory=list)
    done: dict[str, int] = field(default_factory=dict)
    recoveries: list[Recovery] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        options = self.options
        lines = [
            f"seed {options.seed}: {options.jobs} jobs, {options.workers} workers, "
            + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items()),
            "faults: " + ", ".join(f"{count} x {kind}" for kind, count in sorted(self.done.items())),
        ]
        times = [recovery.seconds for recovery in self.recoveries]
        if times:
            middle, longest = statistics.median(times), max(times)
            lines.append(
                f"{len(times)} recoveries: half within {middle:.1f} s, all within {longest:.1f} s; "
                f"the promise is {options.lease + options.heartbeat:g} s and {options.slack:g} s of slack"
            )
        return "\n".join([*lines, *(f"WRONG: {complaint}" for complaint in self.complaints)])


def start_server(engine: str) -> Any:
    """A private server; its clock can be turned if this machine has a compiler."""
    import servers

    try:
        return servers.start(engine, own_clock=True)
    except servers.NoServer:
        return servers.start(engine)


def run(server: Any, options: Options, folder: Path) -> Report:
    """One run against a private server; the workers' logs go to the folder."""
    schema = f"djjobs_chaos_{secrets.token_hex(4)}"
    bystander = Bystander(server, schema)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("DJ_", "DJJOBS_"))}
    variables = {
        "CHAOS_SCHEMA": schema,
        "CHAOS_FOLDER": folder,
        "CHAOS_POISON": int(bool(options.poison)),
        "DJJOBS_LEASE": options.lease,
        "DJJOBS_HEARTBEAT_INTERVAL": options.heartbeat,
        "DJJOBS_GRACE": 1,
        "DJJOBS_MIN_SCHEDULING_INTERVAL": 1,
        # A process that dies while it schedules must not keep the others from it for longer than the test takes.
        "DJJOBS_SCHEDULING_TIMEOUT": options.lease,
        "PYTHONWARNINGS": "ignore::UserWarning",
    }
    variables = {name: str(value) for name, value in variables.items()}
    variables = {**inherited, **environment(bystander.settings_of_workers(), str(folder)), **variables}
    record = Record()
    spells = Spells(server, bystander, record, options.suspension, options.lease / 2)
    with WorkerPool(options.workers, variables, folder) as pool:
        mayhem = Mayhem(server, bystander, pool, record, spells, options.suspension)
        try:
            return _Run(bystander, pool, record, mayhem, options, folder).go()
        finally:
            spells.stop()
            bystander.close()
            (folder / "story.log").write_text("\n".join([*record.story, ""]))


class _Run:
    def __init__(
        self,
        bystander: Bystander,
        pool: WorkerPool,
        record: Record,
        mayhem: Mayhem,
        options: Options,
        folder: Path,
    ) -> None:
        self._bystander, self._pool, self._record, self._options = bystander, pool, record, options
        self._mayhem, self._folder = mayhem, folder
        self._watch = Watch(bystander, self._record, options.most)
        self._report = Report(options, plan(options.seed, options.seconds, options.only))
        self._chance = random.Random(options.seed)
        self._vacant: list[int] = []
        self._replacing = True
        self._fed = 0

    def go(self) -> Report:
        options, report = self._options, self._report
        started = time.monotonic()
        self._pool.declare()
        for place in range(options.workers):
            # Half of the supervisors start as on a command line, all others from what is imported already.
            self._pool.start_worker(place, fresh=not place % 4)
        self._feed(options.numbers // 4)
        if self._work_until(self._is_complete, 60, "not all workers got ready"):
            report.seconds["start"] = time.monotonic() - started
            self._happen()
            report.seconds["faults"] = time.monotonic() - started - report.seconds["start"]
            if self._work_until(self._is_drained, options.patience, "the queue was not drained"):
                report.seconds["drain"] = time.monotonic() - started - sum(report.seconds.values())
                self._dismiss()
        verdict = Verdict(self._bystander, self._record, options, poison.calls(self._folder))
        report.complaints, report.recoveries, report.done = verdict.complaints, verdict.recoveries, self._record.done
        report.seconds["in all"] = time.monotonic() - started
        return report

    # -- the phases --------------------------------------------------------------------------------------------

    def _is_complete(self) -> bool:
        return all(worker.is_ready() for worker in self._pool.workers.values())

    def _happen(self) -> None:
        """Let the faults happen, while more and more numbers come in."""
        options, began = self._options, time.monotonic()
        faults = list(self._report.faults)
        while faults:
            now = time.monotonic() - began
            share = min(1.0, 0.25 + now / (0.9 * options.seconds))
            self._feed(int(options.numbers * share))
            due = next((fault for fault in faults if fault.at <= now and self._mayhem.can(fault)), None)
            if due is not None:
                faults.remove(due)
                self._mayhem.do(due)
                # The clock of the plan stands still while the server is away.
                began += time.monotonic() - began - now
            self._step()
        self._work_until(lambda: self._mayhem.is_over, options.patience, "the faults were not over")
        self._feed(options.numbers)

    def _is_drained(self) -> bool:
        numbers = self._options.numbers
        return self._bystander.is_drained(numbers, (numbers + 1) // 2)

    def _dismiss(self) -> None:
        """Ask everybody to go; nobody may need to be forced."""
        self._work_until(self._is_complete, 30, "not all workers got ready again")
        self._see_populates_return()
        self._replacing = False
        for worker in self._pool.workers.values():
            self._mayhem.ask_to_leave(worker)
        patience = LEAVING + self._options.slack
        if not self._work_until(lambda: not self._pool.workers, patience, "not all workers left in time"):
            for worker in self._pool.workers.values():
                self._record.complain(f"{worker.log.name}, process {worker.pid}, is still at:\n{worker.where()}")
        self._see_processes_gone()

    def _see_populates_return(self) -> None:
        """Nothing is left to do, so that no populate may go on."""
        now, scripts = time.time(), [one for one in self._pool.workers.values() if one.kind == "script"]
        if not self._work_until(lambda: all(one.is_idle_since(now) for one in scripts), LEAVING, "a populate hung"):
            for script in (one for one in scripts if not one.is_idle_since(now)):
                self._record.complain(f"{script.log.name}, process {script.pid}, is still at:\n{script.where()}")

    def _see_processes_gone(self) -> None:
        """Of all workers and of what make() started nobody is left, but for what only a killed supervisor knew."""
        killed = {call.child for call in poison.calls(self._folder) if call.supervisor in self._record.dead}
        self._work_until(lambda: not self._pool.survivors() - killed, self._options.slack, "processes were left")
        for pid in sorted(self._pool.survivors() - killed):
            self._record.complain(f"the process {pid} is still there")

    # -- every moment --------------------------------------------------------------------------------------------

    def _work_until(self, condition: Any, patience: float, complaint: str) -> bool:
        deadline = time.monotonic() + patience
        while not condition():
            if time.monotonic() > deadline or len(self._record.complaints) > _MOST_COMPLAINTS:
                self._record.complain(f"{complaint} within {patience:g} s")
                return False
            self._step()
        return True

    def _step(self) -> None:
        time.sleep(0.05)
        self._mayhem.go_on()
        for worker in self._pool.workers.values():
            worker.children()
        for end in self._pool.ends():
            self._record.tell(f"{end.worker.log.name} ended, process {end.worker.pid}, exit code {end.code}")
            self._judge(end)
            del self._pool.workers[end.worker.place]
            self._vacant.append(end.worker.place)
        # A worker that cannot begin ends at once. Many in a row would leave the others no time.
        while self._vacant and self._replacing and not self._record.in_spell:
            new = self._pool.start_worker(self._vacant.pop(), fresh=self._chance.random() < 0.1)
            self._record.tell(f"{new.log.name} started, process {new.pid}")
        self._watch.look()

    def _feed(self, numbers: int) -> None:
        if numbers > self._fed and not self._record.in_spell:
            self._bystander.feed(range(self._fed, numbers))
            self._fed = numbers

    def _judge(self, end: End) -> None:
        """Whether a worker ended as it should have."""
        worker, record = end.worker, self._record
        if worker.state == "killed":
            return
        # To sign off takes a server, and so does the beginning of a populate or of a worker.
        since = worker.told_to_leave or (end.when if worker.ready else worker.started)
        spell = record.spell_between(since, end.when)
        was_cut_off = not worker.ready and any(since <= cut <= end.when for cut in record.cuts)
        if spell or was_cut_off:
            # A populate waits for the server once it has begun to work.
            was_at_work = worker.ready if worker.kind == "worker" else _AT_WORK.search(worker.words()) is not None
            if worker.state != "leaving" and was_at_work:
                fault = spell.kind if spell else "a cut connection"
                record.complain(f"a {worker.kind} did not survive {fault!r}: {_last_words(end)}")
            record.hit([worker.pid, *sorted(worker.all_children)], "ended while the server was away")
        elif worker.state != "leaving":
            record.complain(f"a {worker.kind} ended by itself with {end.code}: {_last_words(end)}")
            record.hit([worker.pid, *sorted(worker.all_children)], "ended by itself")
        else:
            if _NOT_SIGNED_OFF in worker.words() and record.in_outage(worker.started, end.when):
                # A populate of this script ended while the server was away: its row stays until it is found dead.
                record.hit([worker.pid, *sorted(worker.all_children)], "could not sign off")
            else:
                record.left[worker.pid] = end.when
            # A worker of which jobs have failed says so by its exit code, too; here only poison does.
            if end.code != (1 if _HAS_FAILED.search(worker.words()) else 0):
                record.complain(f"a {worker.kind} left with exit code {end.code}: {_last_words(end)}")
        self._judge_time(end, spell)

    def _judge_time(self, end: End, spell: Spell | None) -> None:
        """A worker that is asked to leave does so in time, also while the server does not answer."""
        took = end.when - end.worker.told_to_leave
        # While the server is restarted nobody here hears of an end.
        if end.worker.state == "leaving" and took > LEAVING + self._options.slack and not (spell and spell.is_outage):
            self._record.complain(f"a {end.worker.kind} took {took:.1f} s to leave: {_last_words(end)}")


def _last_words(end: End) -> str:
    lines = "\n    ".join(line[:500] for line in end.worker.words().splitlines()[-12:])
    return f"{end.worker.log.name}, process {end.worker.pid}\n    {lines}"


# -- the command line ------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="of the first round; each further one adds 1. Defaults to a new one")
    parser.add_argument("--minutes", type=float, default=10, help="begin no round after so long (%(default)s)")
    parser.add_argument("--workers", type=int, default=16, help="how many at a time (%(default)s)")
    parser.add_argument("--jobs", type=int, default=3000, help="of a round (%(default)s)")
    parser.add_argument("--seconds", type=float, default=90, help="of faults in a round (%(default)s)")
    parser.add_argument(
        "--engine",
        choices=("mysql", "postgresql", "mariadb"),
        action="append",
        help="mysql and postgresql, unless said",
    )
    parser.add_argument("--only", choices=KINDS, action="append", default=[], help="this kind of fault (all)")
    chosen = parser.parse_args()
    os.environ["DJ_IGNORE_CONFIG_FILE"] = "true"  # only the settings of the run count
    seed = secrets.randbelow(10**6) if chosen.seed is None else chosen.seed
    deadline, failed = time.monotonic() + 60 * chosen.minutes, 0
    while True:
        for engine in chosen.engine or ("mysql", "postgresql"):
            options = Options(seed, chosen.jobs, chosen.workers, chosen.seconds, only=tuple(chosen.only))
            failed += not _round(engine, options)
        seed += 1
        if time.monotonic() > deadline:
            break
    print(f"{failed} rounds failed" if failed else "all rounds passed")
    return 1 if failed else 0


def _round(engine: str, options: Options) -> bool:
    folder = Path(tempfile.mkdtemp(prefix="djjobs-chaos-"))
    with start_server(engine) as server:
        report = run(server, options, folder)
    print(f"{engine}, {report}", flush=True)
    if report.complaints:
        print(f"The workers' logs are in {folder}. Once more: --engine {engine} --seed {options.seed}", flush=True)
        return False
    shutil.rmtree(folder)
    return True


if __name__ == "__main__":
    sys.exit(main())
