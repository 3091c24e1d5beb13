"""A lab that has worked with DataJoint alone switches over, and nothing it has told DataJoint is forgotten."""

from __future__ import annotations

import datetime
import decimal
import gc
import logging
import os
import types
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import datajoint as dj
import fork_server
import pytest
from conftest import ENGINE
from pipelines import FLOAT, INT, computed, job_counts, manual, rows_of
from test_migrate import legacy_jobs

import djjobs
from djjobs.queue.keys import Keys
from djjobs.queue.native import bring_native_jobs, bring_native_jobs_once
from djjobs.queue.queue import Queue

#: DataJoint 2.3 cannot declare its own queue for such keys on PostgreSQL.
NOT_NATIVE = ("moment", "choice", "flag") if ENGINE == "postgresql" else ()

native = pytest.mark.only(datajoint=2)
classic = pytest.mark.only(datajoint=0)


# -- from DataJoint 2's own queue -------------------------------------------------------------------------------


class NativeLab:
    """Sessions 0, 1, ... and Spectrum without the mixin. make() fails for the sessions in `bad`."""

    def __init__(self, schema: Any, count: int = 8, bad: tuple[int, ...] = ()) -> None:
        self.schema, self.bad = schema, set(bad)
        self.Session = manual(schema, f"session : {INT}", "Session")
        self.Session.insert([(number,) for number in range(count)])
        self.Spectrum = self.plain("Spectrum")

    def plain(self, name: str, base: type = dj.Computed) -> Any:
        def make(table: Any, key: dict[str, Any]) -> None:
            if key["session"] in self.bad:
                raise ValueError(f"noise in {key['session']}")
            table.insert1({**key, "power": 1})

        members = {"definition": f"-> Session\n---\npower : {FLOAT}", "make": make}
        return self.schema(type(name, (base,), members), context={"Session": self.Session})

    def switch_over(self) -> Any:
        djjobs.adopt(self.schema)
        return self.Spectrum

    @property
    def queue(self) -> Queue:
        return Queue.of(self.schema.connection, self.schema.database)


def native_jobs(table: Any) -> Any:
    """DataJoint's own queue of a table, whether or not it has the mixin."""
    from datajoint.jobs import Job

    return Job(table())


def by_session(table: Any, *names: str) -> dict[int, Any]:
    """What `~jobs` itself tells of each session."""
    jobs = Queue.of(table.connection, table.database).jobs & {"table_name": table.table_name}
    rows = {row["key"]["session"]: row for row in rows_of(jobs)}
    return {session: tuple(row[name] for name in names) for session, row in sorted(rows.items())}


@native
def test_what_was_ignored_and_what_failed_stay_so(schema: Any) -> None:
    lab = NativeLab(schema, bad=(1, 2))
    lab.Spectrum.populate(reserve_jobs=True, suppress_errors=True, max_calls=4)
    lab.Spectrum.jobs.ignore({"session": 7})
    lab.bad.clear()
    table = lab.switch_over()
    assert djjobs.migrate(schema) == len(native_jobs(table)) == 6
    told = by_session(table, "status", "error_message", "attempt")
    assert told == {
        1: ("error", "ValueError: noise in 1", 1),
        2: ("error", "ValueError: noise in 2", 1),
        4: ("scheduled", "", 0),
        5: ("scheduled", "", 0),
        6: ("scheduled", "", 0),
        7: ("ignore", "", 0),
    }
    stacks = [row["error_stack"] for row in rows_of(table.jobs.errors)]
    assert all("raise ValueError" in stack for stack in stacks)
    assert {row["pid"] for row in rows_of(table.jobs.errors)} == {os.getpid()}
    assert table.populate(reserve_jobs=True)["success_count"] == 3
    assert job_counts(table) == {"error": 2, "ignore": 1}
    assert table.retry_jobs({"session": 1}) == 1
    assert table.populate(reserve_jobs=True)["success_count"] == 1


@native
def test_the_command_brings_them_along(schema: Any) -> None:
    lab = NativeLab(schema)
    lab.Spectrum.jobs.refresh()
    for expected in ("8 rows were converted or copied", "0 rows were converted or copied"):
        done = fork_server.run(["-m", "djjobs.cli", "migrate", schema.database])
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout
    due_times = [due for (due,) in by_session(lab.switch_over(), "due_time").values()]
    assert due_times == sorted(set(due_times)) and len(due_times) == 8  # the order of the keys


@native
def test_pending_jobs_keep_priority_and_due_time_in_whatever_time_zone_the_session_is(
    schema: Any, away: Callable[[], None]
) -> None:
    lab = NativeLab(schema, count=4)
    away()
    jobs = lab.Spectrum.jobs
    jobs.refresh("session = 0", priority=2)
    jobs.refresh("session = 1", priority=9)
    jobs.refresh("session = 2", priority=1, delay=3600)
    table = lab.switch_over()
    assert djjobs.migrate(schema) == 3
    told = by_session(table, "status", "priority", "turn", "due_time", "created_time", "timestamp")
    assert {session: row[:3] for session, row in told.items()} == {
        0: ("scheduled", 2, 2),
        1: ("scheduled", 9, 9),
        2: ("scheduled", 1, None),
    }
    now, hour = server_time(lab.queue), datetime.timedelta(hours=1)
    _, _, _, due, created, changed = told[2]
    assert now < due < now + hour
    assert now - hour < created == changed <= now
    assert order_of_work(table, schedule_jobs=False) == [0, 1]  # 2 is not due, 3 was not scheduled


def server_time(queue: Queue) -> datetime.datetime:
    return queue.ask(queue.engine.connection.server_time)


def order_of_work(table: Any, **options: Any) -> list[int]:
    """The sessions that a populate makes, in that order."""
    made: list[int] = []
    make = table.make
    table.make = lambda self, key: (made.append(key["session"]), make(self, key))[1]
    try:
        table.populate(reserve_jobs=True, **options)
    finally:
        table.make = make
    return made


@pytest.fixture
def away(server: Any) -> Iterator[Callable[[], None]]:
    """The session's time zone becomes another than the server's."""
    zone, home = (
        ("TIME ZONE '-7'", "TIME ZONE DEFAULT")
        if ENGINE == "postgresql"
        else (
            "time_zone = '-07:00'",
            "time_zone = @@global.time_zone",
        )
    )
    yield lambda: dj.conn().query(f"SET {zone}")
    dj.conn().query(f"SET {home}")


@native
def test_finished_jobs_come_with_their_duration_if_their_result_is_there(
    schema: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dj.config.jobs, "keep_completed", True)
    lab = NativeLab(schema, count=3)
    lab.Spectrum.populate(reserve_jobs=True)
    native_durations = [row["duration"] for row in rows_of(lab.Spectrum.jobs)]
    (lab.Spectrum & "session = 2").delete_quick()
    lab.Spectrum.jobs.update1({"session": 1, "version": "a1b2c3"})
    table = lab.switch_over()
    assert djjobs.migrate(schema) == 2
    assert by_session(table, "status", "run_duration", "run_metadata") == {
        0: ("success", native_durations[0], None),
        1: ("success", native_durations[1], {"version": "a1b2c3"}),
    }


@native
def test_what_was_made_since_is_no_error_and_is_not_made_again(schema: Any) -> None:
    lab = NativeLab(schema, count=3, bad=(0,))
    lab.Spectrum.populate(reserve_jobs=True, suppress_errors=True, max_calls=1)
    lab.bad.clear()
    lab.Spectrum.populate()
    assert len(native_jobs(lab.Spectrum)) == 3
    table = lab.switch_over()
    assert djjobs.migrate(schema) == 0
    assert job_counts(table) == {}


@native
def test_reserved_jobs_are_left_to_the_native_worker(schema: Any) -> None:
    lab = NativeLab(schema, count=2)
    lab.Spectrum.jobs.refresh()
    assert lab.Spectrum.jobs.reserve({"session": 0})
    before = rows_of(native_jobs(lab.Spectrum))
    table = lab.switch_over()
    assert djjobs.migrate(schema) == 1
    assert by_session(table, "status") == {1: ("scheduled",)}
    assert rows_of(native_jobs(table)) == before


@native
def test_jobs_of_our_queue_stay_as_they_are(schema: Any) -> None:
    lab = NativeLab(schema, count=3)
    lab.Spectrum.jobs.refresh(priority=1)
    table = lab.switch_over()
    table.ignore_jobs({"session": 1})
    assert djjobs.migrate(schema) == 0
    assert by_session(table, "status", "priority") == {0: ("scheduled", 1), 1: ("ignore", 1), 2: ("scheduled", 1)}
    assert djjobs.migrate(schema.database) == 0


@native
def test_keys_of_every_type_get_the_hash_that_scheduling_gives_them(schema: Any) -> None:
    types_of_keys: dict[str, tuple[str, list[Any]]] = {
        "number": ("int32", [1, -7, 2**31 - 1]),
        "name": ("varchar(20)", ["m1", 'Zoë "x" \\ 100%', "  x "]),
        "day": ("date", [datetime.date(2024, 2, 29), datetime.date(1999, 1, 1), datetime.date(1000, 1, 1)]),
        "moment": ("datetime(6)", [datetime.datetime(2024, 1, 2, 3, 4, 5, 60), *[datetime.datetime(2024, 1, 2)] * 2]),
        "amount": ("decimal(8,3)", [decimal.Decimal("1.5"), decimal.Decimal("-0.001"), decimal.Decimal("12345")]),
        "choice": ("enum('a','b c')", ["a", "b c", "a"]),
        "flag": ("bool", [True, False, True]),
    }
    if ENGINE != "postgresql":
        types_of_keys["id"] = ("uuid", [uuid.UUID(int=7), uuid.uuid4(), uuid.uuid4()])
    for unfit in NOT_NATIVE:
        del types_of_keys[unfit]
    definition = "\n".join(f"{name} : {type_}" for name, (type_, _) in types_of_keys.items())
    source = manual(schema, definition)
    source.insert([{name: values[row] for name, (_, values) in types_of_keys.items()} for row in range(3)])
    members = {"definition": "-> Source", "make": lambda self, key: self.insert1(key)}
    before = schema(type("Before", (dj.Computed,), members), context={"Source": source})
    scheduled = computed(schema, "-> Source", {"Source": source}, "Scheduled")
    before.jobs.refresh()
    assert int(scheduled.schedule_jobs()) == 3
    djjobs.adopt(schema)
    assert djjobs.migrate(schema) == 3
    hashes = [{row["key_hash"]: row["key"] for row in rows_of(table.jobs)} for table in (before, scheduled)]
    assert hashes[0] == hashes[1]
    assert int(before.schedule_jobs()) == 0
    assert before.populate(reserve_jobs=True) == {"success_count": 3, "error_list": []}


@native
def test_tables_that_stay_with_datajoint_are_left_out_if_their_classes_are_known(schema: Any) -> None:
    lab = NativeLab(schema, count=2)
    other = lab.plain("Other", dj.Imported)
    for table in (lab.Spectrum, other):
        table.jobs.refresh()
    module = types.ModuleType("lab")
    module.Spectrum = lab.Spectrum
    djjobs.adopt(module)
    assert djjobs.migrate(schema.database) == 2
    assert {row["table_name"] for row in rows_of(djjobs.jobs(schema))} == {"__spectrum"}
    assert other.populate(reserve_jobs=True)["success_count"] == 2


@native
def test_all_tables_are_taken_where_nobody_knows_their_classes(schema: Any) -> None:
    lab = NativeLab(schema, count=2)
    for table in (lab.Spectrum, lab.plain("Other", dj.Imported), lab.plain("Gone")):
        table.jobs.refresh()
    schema.connection.query(f"DROP TABLE {table.full_table_name}")
    code = f"import djjobs; print(djjobs.migrate({schema.database!r}))"
    done = fork_server.run(["-c", code])
    assert done.stdout.split() == ["4"], done.stderr
    assert {row["table_name"] for row in rows_of(djjobs.jobs(schema))} == {"__spectrum", "_other"}


@native
def test_the_first_use_of_a_queue_brings_them_along_once_and_says_so(
    schema: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lab = NativeLab(schema, count=4, bad=(0,))
    lab.Spectrum.populate(reserve_jobs=True, suppress_errors=True, max_calls=1)
    lab.Spectrum.jobs.ignore({"session": 1})
    lab.Spectrum.jobs.ignore({"session": 2})
    table = lab.switch_over()
    with caplog.at_level(logging.WARNING, "djjobs"):
        bring_native_jobs_once(lab.queue, table())
        table.jobs.errors.delete()
        bring_native_jobs_once(lab.queue, table())
    assert words_of_ours(caplog) == [
        f"Spectrum (schema {schema.database}): 2 ignored, 1 failed and 1 scheduled jobs of DataJoint's own queue "
        "were brought along"
    ]
    assert job_counts(table) == {"ignore": 2, "scheduled": 1}


@native
def test_what_a_person_removed_after_the_migration_does_not_come_back_with_the_first_use(schema: Any) -> None:
    lab = NativeLab(schema, count=2, bad=(0,))
    lab.Spectrum.populate(reserve_jobs=True, suppress_errors=True)
    table = lab.switch_over()
    assert djjobs.migrate(schema) == 1
    table.jobs.errors.delete()
    lab.bad.clear()
    bring_native_jobs_once(lab.queue, table())
    assert table.populate(reserve_jobs=True)["success_count"] == 1


@native
def test_jobs_whose_keys_are_not_those_of_key_source_stay_behind(schema: Any, caplog: pytest.LogCaptureFixture) -> None:
    lab = NativeLab(schema, count=2)
    lab.Spectrum.jobs.refresh()
    param = manual(schema, f"param : {INT}", "Param")
    members = {"key_source": property(lambda self: lab.Session * param), "definition": f"-> Session\nparam : {INT}"}
    lab.Spectrum().drop_quick()
    table = schema(type("Spectrum", (djjobs.Computed,), members), context={"Session": lab.Session})
    with caplog.at_level(logging.WARNING, "djjobs"):
        assert bring_native_jobs(lab.queue, table.table_name, Keys(table(), (), lab.queue.engine)) == {}
    assert "its keys (session) are not those of the table now" in caplog.text


@native
@pytest.mark.parametrize("definition", ["session : varchar(10)", f"recording : {INT}"])
def test_jobs_of_a_table_that_was_declared_anew_with_other_keys_stay_behind(
    schema: Any, definition: str, caplog: pytest.LogCaptureFixture
) -> None:
    lab = NativeLab(schema, count=2)
    lab.Spectrum.jobs.refresh()
    for table in (lab.Spectrum(), lab.Session()):
        table.drop_quick()
    source = manual(schema, definition, "Session")
    source.insert([("1",)])
    table = computed(schema, "-> Session", {"Session": source}, "Spectrum")
    assert bring_native_jobs(lab.queue, table.table_name) == {}
    assert djjobs.migrate(schema) == 0
    assert words_of_ours(caplog)[0].endswith("its keys (session) are not those of the table now")
    assert table.populate(reserve_jobs=True)["success_count"] == 1


def test_a_table_without_a_native_queue_costs_one_look_and_no_word(
    schema: Any, caplog: pytest.LogCaptureFixture
) -> None:
    source = manual(schema, f"session : {INT}")
    table = computed(schema, "-> Source", {"Source": source})
    queue = Queue.of(schema.connection, schema.database)
    with caplog.at_level(logging.DEBUG, "djjobs"):
        assert bring_native_jobs(queue, table.table_name) == {}
        assert djjobs.migrate(schema) == 0
    assert words_of_ours(caplog) == []


def words_of_ours(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "djjobs"]


# -- schemas that are activated later, as those of the DataJoint Elements -------------------------------------------


def element(name: str = "element") -> Any:
    """A module as an Element is: its schema is named later, by the lab that uses it."""
    module: Any = types.ModuleType(name)
    module.schema = dj.Schema()
    module.dj, module.djjobs, module.Computed = dj, djjobs, djjobs.Computed
    exec(
        f'''
@schema
class Session(dj.Manual):
    definition = "session : {INT}"

@schema
class Spectrum(dj.Computed):
    definition = """
    -> Session
    ---
    power : {FLOAT}
    """

    class Band(dj.Part):
        definition = """
        -> master
        band : {INT}
        """

    def make(self, key):
        self.insert1(dict(key, power=1))
        self.Band.insert1(dict(key, band=1))

class Recipe(Spectrum):
    """Not a table."""

@schema
class Raw(dj.Imported):
    definition = "-> Session"

    def make(self, key):
        self.insert1(key)
''',
        vars(module),
    )
    return module


@pytest.fixture
def database(schema: Any) -> Any:
    """A name that schemas can be activated by."""
    return schema.database


@pytest.mark.parametrize("what", ["module", "schema"])
def test_an_element_is_adopted_before_it_is_activated(
    database: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = element()
    to_adopt = lab if what == "module" else lab.schema
    for _twice in range(2):
        assert djjobs.adopt(to_adopt) == [lab.Spectrum, lab.Raw]
    assert not issubclass(lab.Session, djjobs.JobsMixin)
    lab.schema.activate(database)
    assert set(djjobs.adopt(to_adopt)) == {lab.Spectrum, lab.Raw}
    lab.Session.insert([(1,), (2,)])
    assert lab.Spectrum.populate(reserve_jobs=True) == {"success_count": 2, "error_list": []}
    assert len(lab.Spectrum()) == len(lab.Spectrum.Band()) == 2
    gc.collect()  # classes of other tests would hear of changes, too
    monkeypatch.setattr(djjobs.settings, "events", True)
    lab.Session.insert1((3,))
    assert djjobs.flush_events()
    assert [row["key"] for row in rows_of(lab.Spectrum.jobs.scheduled)] == [{"session": 3}]
    assert len(lab.Raw.jobs) >= 1


def test_a_module_with_activated_and_waiting_schemas_is_adopted_whole(schema: Any, database: str) -> None:
    lab, other = element(), element("other")
    lab.schema.activate(database)
    lab.Later, lab.other, lab.Base = other.Spectrum, other, djjobs.Imported
    assert djjobs.adopt(lab) == [lab.Spectrum, lab.Raw, lab.Later]
    assert not issubclass(other.Raw, djjobs.JobsMixin)
    later = dj.Schema(f"{database}_later")
    try:
        other.schema.activate(later.database)
        other.Session.insert1((1,))
        assert lab.Later.populate(reserve_jobs=True)["success_count"] == 1
    finally:
        later.drop()


def test_classes_of_a_waiting_schema_are_not_yet_shown(server: Any) -> None:
    """They have no table to look at."""
    lab = element()
    djjobs.adopt(lab)
    assert list(djjobs.status(lab).index) == []


def test_a_table_that_is_made_from_another_is_adopted_with_it(schema: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = manual(schema, f"session : {INT}", "Session")
    members = {"definition": "-> Session", "make": lambda self, key: self.insert1(key)}
    first = schema(type("First", (dj.Computed,), members), context={"Session": source})
    second = schema(type("Second", (first,), {}), context={"Session": source})
    module: Any = types.ModuleType("lab")
    module.second, module.first = second, first
    assert djjobs.adopt(module) == [second, first]
    monkeypatch.setattr(djjobs.settings, "events", True)
    source.insert1((1,))
    assert djjobs.flush_events()
    assert job_counts(second) == job_counts(first) == {"scheduled": 1}


def test_a_waiting_schema_without_classes_says_what_to_import(server: Any) -> None:
    with pytest.raises(djjobs.DjJobsError, match=r"not activated yet, has no Computed.*Import the module"):
        djjobs.adopt(dj.Schema())


# -- labs whose DataJoint 0.14 stores no Python objects --------------------------------------------------------------


@pytest.fixture
def no_native_blobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with dj.config(enable_python_native_blobs=False):
        yield


def failing_lab(schema: Any) -> Any:
    def make(table: Any, key: dict[str, Any]) -> None:
        raise ValueError("noise")

    source = manual(schema, f"session : {INT}", "Session")
    source.insert([(1,), (2,)])
    return computed(schema, "-> Session", {"Session": source}, "Spectrum", make=make)


@classic
def test_errors_are_recorded_without_native_blobs(schema: Any, no_native_blobs: None) -> None:
    table = failing_lab(schema)
    errors = table.populate(reserve_jobs=True, suppress_errors=True)["error_list"]
    assert [error for _, error in errors] == ["ValueError: noise"] * 2
    assert job_counts(table) == {"error": 2}
    assert all("raise ValueError" in stack for stack in table.jobs.errors.fetch("error_stack"))


@classic
def test_an_error_that_is_raised_is_make_s_own_without_native_blobs(schema: Any, no_native_blobs: None) -> None:
    table = failing_lab(schema)
    with pytest.raises(ValueError, match="noise"):
        table.populate(reserve_jobs=True)
    assert job_counts(table) == {"error": 1, "scheduled": 1}
    assert dj.config["enable_python_native_blobs"] is False


@classic
def test_a_legacy_queue_is_migrated_without_native_blobs(schema: Any) -> None:
    table = failing_lab(schema)
    legacy_jobs(schema, [("__spectrum", "a" * 32, "error", {"session": 1})])
    with dj.config(enable_python_native_blobs=False):
        assert djjobs.migrate(schema) == 1
        assert int(table.schedule_jobs()) == 1
        assert rows_of(table.jobs.errors)[0]["error_stack"] == "stack"
        assert table.retry_jobs() == 1
        assert len(table.populate(reserve_jobs=True, suppress_errors=True)["error_list"]) == 2


@classic
def test_a_table_without_the_mixin_shares_the_queue_without_native_blobs(schema: Any, no_native_blobs: None) -> None:
    table = failing_lab(schema)
    table.schedule_jobs()
    members = {"definition": "-> Session", "make": table.make}
    plain = schema(type("Plain", (dj.Computed,), members), context={"Session": table().parents(as_objects=True)[0]})
    assert len(plain.populate(reserve_jobs=True, suppress_errors=True)["error_list"]) == 2


@native
@pytest.mark.parametrize("restrictions", [(), ("session < 3",)])
def test_the_first_populate_heeds_what_datajoint_was_told(
    schema: Any, restrictions: tuple[Any, ...], caplog: pytest.LogCaptureFixture
) -> None:
    lab = NativeLab(schema, count=4, bad=(0,))
    lab.Spectrum.populate(reserve_jobs=True, suppress_errors=True, max_calls=1)
    lab.Spectrum.jobs.ignore({"session": 1})
    lab.bad.clear()
    table = lab.switch_over()
    table.populate(*restrictions, reserve_jobs=True)
    assert by_session(table, "status") | {3: ("scheduled",)} == {0: ("error",), 1: ("ignore",), 3: ("scheduled",)}
    assert "1 ignored, 1 failed" in caplog.text
    table.jobs.errors.delete()
    assert int(table.schedule_jobs(min_scheduling_interval=0)) == 1


@native
def test_a_first_use_that_failed_is_made_good_by_the_next(schema: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = NativeLab(schema, count=3)
    lab.Spectrum.jobs.ignore({"session": 1})
    table = lab.switch_over()

    def fail(*_: Any) -> None:
        raise ConnectionError("just then")

    with monkeypatch.context() as patch:
        patch.setattr("djjobs.queue.native.take_over", fail)
        with pytest.raises(ConnectionError):
            table.populate(reserve_jobs=True)
    assert table.populate(reserve_jobs=True)["success_count"] == 2
    assert by_session(table, "status") == {1: ("ignore",)}


@native
def test_an_event_heeds_what_datajoint_was_told(schema: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = NativeLab(schema, count=3)
    lab.Spectrum.jobs.ignore({"session": 1})
    lab.Spectrum.populate("session = 0")
    table = lab.switch_over()
    monkeypatch.setattr(djjobs.settings, "events", True)
    (table & "session = 0").delete()  # all keys are looked at, and this one is scheduled again
    assert djjobs.flush_events()
    monkeypatch.setattr(djjobs.settings, "events", False)
    assert by_session(table, "status") == {0: ("scheduled",), 1: ("ignore",), 2: ("scheduled",)}
