"""Break one guard of djjobs at a time and see whether a test notices.

First `python tests/mutation/run.py trace`: the tests run once on a copy of the tree that notes which statement and
which function each comes by. Then `python tests/mutation/run.py try --sample 100`: each mutant is shown to the tests
that come by it, the quickest first. `list` shows the mutants. One server does for all; the tree is not touched.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mutation.mutants import Mutant, choose, find
from mutation.touched import Touched, instrument

ROOT = Path(__file__).resolve().parents[2]

#: The tests of what is broken here. The others take long and come by the same places.
FILES = """test_cancel test_claims test_cleanup test_concurrency test_events test_finds_work test_jobs_view
    test_keyed_jobs test_leases test_populate test_queue_table test_races* test_retention test_retries test_run_hooks
    test_runs test_schedule test_scheduler test_schedules test_timeouts test_worker"""
#: Which files are about what, by a part of the mutant's name: their tests come first.
ABOUT = (
    (r"races", r""),
    (r"schedule|concurrency|finds_work", r"scheduling|scope|schedule_new|is_scheduled|enqueue:"),
    (r"events|runs", r"automatic|take_along"),
    (
        r"claims|populate|retries|leases",
        r"jobs:(pick|give_turns|next_turn|reserve|find_near|find_chosen|release_claim)|claim:",
    ),
    (r"retries|leases|cancel|timeouts", r"jobs:(_|look_at|release|complete|fail|try_again|save)|finish:"),
    (r"jobs_view|drop_in|keyed_jobs", r"by_hand|release_older"),
    (r"cleanup|retention|runs", r"orphans|expired|overtaken|cleanup:|end_runs|delete_runs|created_before"),
    (r"cancel", r"cancel|called|asked_to_stop|has_worker|still_in_run"),
    (r"run_hooks|runs", r"^runs:|^hooks:"),
    (r"schedules|scheduler", r"^schedules:|^rows:"),
    (r"leases|worker", r"^workers:|^leases:"),
)
#: Of one engine alone.
ENGINES = {"mysql.py": ("mysql", "mariadb"), "postgresql.py": ("postgresql",)}


@dataclass
class Verdict:
    """What came of one mutant: "killed", "survived", "unseen" (no test comes by) or "slow" (killed by the time)."""

    name: str
    kind: str
    outcome: str
    by: str = ""
    why: str = ""
    tests: int = 0
    left_out: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        by = f" by {self.by} ({self.why})" if self.by else ""
        left = f", {self.left_out} left out" if self.left_out else ""
        return f"{self.outcome:8} {self.name}{by} ({self.tests} tests{left}, {self.seconds:.1f} s)"


class Copy:
    """A copy of the tree, to be changed and tested."""

    def __init__(self, folder: str, environment: dict[str, str], python: str) -> None:
        self.root, self._environment, self._python = Path(folder) / "tree", environment, python
        for name in ("djjobs", "tests"):
            shutil.copytree(ROOT / name, self.root / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "setup.cfg"):
            shutil.copy(ROOT / name, self.root / name)

    @contextlib.contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        path = self.root / mutant.file
        source = path.read_text()
        path.write_text(mutant.apply(source))
        try:
            yield
        finally:
            path.write_text(source)

    def test(self, *arguments: str, limit: float) -> tuple[int | None, str]:
        """Run pytest; its exit status, None if it took too long, and what it said."""
        command = [self._python, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", *arguments]
        paths = os.pathsep.join([str(self.root), str(self.root / "tests")])
        environment = {**self._environment, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
        with tempfile.TemporaryFile("w+") as said:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            # Workers that a test has left behind are of its group, unless they have begun a session of their own.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            said.seek(0)
            return status, said.read()


@contextlib.contextmanager
def server(engine: str) -> Iterator[dict[str, str]]:
    """One server for all; what the environment must say of it."""
    if os.environ.get("DJJOBS_TEST_HOST"):
        yield {**os.environ, "ENGINE": engine}
        return
    import servers

    with servers.start(engine) as running:
        names = {"HOST": running.host, "PORT": running.port, "USER": running.user, "PASSWORD": running.password}
        given = {f"DJJOBS_TEST_{name}": str(value) for name, value in names.items()}
        yield {**os.environ, **given, "ENGINE": engine}


def trace(copy: Copy, path: Path, files: list[str]) -> None:
    """Run the tests once and note what each comes by."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    copy._environment["DJJOBS_TOUCHED"] = str(path)
    instrument(copy.root)
    status, said = copy.test("-p", "djjobs_touched", "--timeout", "120", *tests_in(copy.root, files), limit=3600)
    print("\n".join(said.splitlines()[-12:]))
    touched = Touched.read(path)
    total = sum(touched.seconds.values())
    print(f"{len(touched.seconds)} tests in {total:.0f} s, {len(touched.failed)} of them not passed (left out); {path}")
    if status is None:
        sys.exit("The tests took longer than an hour.")


def tests_in(root: Path, names: list[str]) -> list[str]:
    found = [path for name in names for path in sorted((root / "tests").glob(f"{name}.py"))]
    return [str(path.relative_to(root)) for path in found]


class Trial:
    """Shows mutants to the tests that can notice them.

    A test that fails without the mutant too, in the same company, is not believed and left out from then on.
    """

    def __init__(self, copy: Copy, touched: Touched, budget: float, without: list[str]) -> None:
        self._copy, self._touched, self._budget, self._without = copy, touched, budget, without
        self._believed: set[str] = set()

    def of(self, mutant: Mutant) -> Verdict:
        while True:
            verdict, tests = self._try(mutant)
            if not verdict.by or verdict.by in self._believed:
                return verdict
            company = tests[: tests.index(verdict.by) + 1] if verdict.by in tests else tests
            if self._run(company)[0] == 0:
                self._believed.add(verdict.by)
                return verdict
            print(f"not believed: {verdict.by}", flush=True)
            self._without.append(verdict.by)

    def _try(self, mutant: Mutant) -> tuple[Verdict, list[str]]:
        can_notice = {test for test in self._touched.by(mutant) if not any(name in test for name in self._without)}
        files = [files for files, names in ABOUT if re.search(names, mutant.name)]
        tests, left = self._touched.quickest(can_notice, self._budget, rf"test_({'|'.join(files)})")
        verdict = Verdict(mutant.name, mutant.kind, "unseen", tests=len(tests), left_out=left)
        if not tests:
            return verdict, tests
        started = time.monotonic()
        with self._copy.changed(mutant):
            status, verdict.by, verdict.why = self._run(tests)
        verdict.seconds = time.monotonic() - started
        verdict.outcome = {None: "slow", 0: "survived", 1: "killed"}.get(status, f"status {status}")
        return verdict, tests

    def _run(self, tests: list[str]) -> tuple[int | None, str, str]:
        """Run these tests up to the first that fails; pytest's exit status, that one, and what it failed with."""
        chosen = self._copy.root / "chosen"
        chosen.write_text("\n".join(tests))
        status, said = self._copy.test("-x", "--timeout", "30", f"@{chosen}", limit=3 * self._budget + 60)
        failures = [line for line in said.splitlines() if line.startswith(("FAILED tests/", "ERROR tests/"))]
        why = [line.partition(": ")[2] for line in said.splitlines() if re.match(r"(/|E   )\S*:\d+: ", line)]
        by = failures[0].split(" - ")[0].partition(" ")[2] if failures else ""
        return status, by, why[0] if why else ""


def report(verdicts: list[Verdict]) -> None:
    killed = sum(verdict.outcome in ("killed", "slow") for verdict in verdicts)
    print(f"\n{killed} of {len(verdicts)} killed ({killed / max(len(verdicts), 1):.0%})")
    kinds = sorted({verdict.kind for verdict in verdicts})
    for kind in kinds:
        of_kind = [verdict for verdict in verdicts if verdict.kind == kind]
        print(f"  {kind}: {sum(v.outcome in ('killed', 'slow') for v in of_kind)} of {len(of_kind)}")
    for verdict in verdicts:
        if verdict.outcome not in ("killed", "slow"):
            print(f"  {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("list", "trace", "try"))
    parser.add_argument("--engine", default=os.environ.get("ENGINE") or "postgresql")
    parser.add_argument("--python", default=sys.executable, help="the interpreter to test with")
    parser.add_argument("--only", default="", help="mutants with this in their name; * stands for anything")
    parser.add_argument("--kind", nargs="*", help="mutants of these kinds")
    parser.add_argument("--names", type=Path, help="the mutants that this file names, one a line")
    parser.add_argument("--sample", type=int, default=0, help="so many of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", nargs="*", default=FILES.split(), help="test files to trace")
    parser.add_argument("--without", nargs="*", default=[], help="leave out tests with this in their name")
    parser.add_argument("--budget", type=float, default=12.0, help="seconds of tests a mutant")
    parser.add_argument("--trace", type=Path, default=ROOT / "build" / "mutation" / "trace.jsonl")
    parser.add_argument("--results", type=Path, help="write the verdicts here, and go on where it ends")
    options = parser.parse_args()

    mutants = [m for m in find(ROOT) if options.engine in ENGINES.get(Path(m.file).name, (options.engine,))]
    if options.kind:
        mutants = [mutant for mutant in mutants if mutant.kind in options.kind]
    if options.names:
        names = set(options.names.read_text().splitlines())
        mutants = [mutant for mutant in mutants if mutant.name in names]
    mutants = choose(mutants, options.only, options.sample, options.seed)
    if options.action == "list":
        print("\n".join(mutant.name for mutant in mutants))
        return
    with server(options.engine) as environment, tempfile.TemporaryDirectory(prefix="djjobs-mutants-") as folder:
        copy = Copy(folder, environment, options.python)
        if options.action == "trace":
            trace(copy, options.trace, options.files)
        else:
            report(list(verdicts_on(mutants, copy, options)))


def verdicts_on(mutants: list[Mutant], copy: Copy, options: argparse.Namespace) -> Iterator[Verdict]:
    trial = Trial(copy, Touched.read(options.trace), options.budget, options.without)
    known: dict[str, Verdict] = {}
    if options.results and options.results.exists():
        lines = options.results.read_text().splitlines()
        known = {verdict.name: verdict for verdict in (Verdict(**json.loads(line)) for line in lines)}
    for mutant in mutants:
        verdict = known.get(mutant.name)
        if verdict is None:
            verdict = trial.of(mutant)
            print(verdict, flush=True)
            if options.results:
                with options.results.open("a") as file:
                    file.write(json.dumps(asdict(verdict)) + "\n")
        yield verdict


if __name__ == "__main__":
    main()
