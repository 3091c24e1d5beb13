"""The tables of a queue, as ordinary DataJoint tables: `~jobs` and what belongs to it."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

import numpy as np
from datajoint import AndList, Not

from ..dj.compat import datajoint_api
from ..dj.tables import Table, change_attribute, preview, repr_html, set_up
from ..errors import DjJobsError
from ..sql import Engine, engine_for

__all__ = [
    "EARLIER_MARKS",
    "ERROR_MESSAGE_LENGTH",
    "RESTRICTION_LENGTH",
    "RUN_NAME_LENGTH",
    "STATUSES",
    "UNFINISHED_MARK",
    "VERSION_MARK",
    "Firings",
    "JobControl",
    "Jobs",
    "Leader",
    "Runs",
    "Schedules",
    "Sightings",
    "Workers",
    "columns_of",
    "in_all",
    "job_columns",
    "tell_of_running",
]

logger = logging.getLogger("djjobs")

STATUSES = ("scheduled", "reserved", "error", "ignore", "success", "cancelled")
ERROR_MESSAGE_LENGTH = 2047
RUN_NAME_LENGTH = 255
RESTRICTION_LENGTH = 1000
#: The comment of `~jobs` once all of it is there. A later version will know by it which version made the table.
VERSION_MARK = "djjobs queue, version 3"
#: The comments of earlier versions. `djjobs migrate` brings them up to date. Version 1 had no `automatic`. Version 2
#: had no `~sightings`, and no `beats` in `~workers`.
EARLIER_MARKS = ("djjobs queue, version 1", "djjobs queue, version 2")
#: The comment of `~jobs` before that.
UNFINISHED_MARK = "djjobs queue, unfinished"

#: The columns by which jobs are found. They hold plain words only.
ASCII_COLUMNS = ("table_name", "key_hash", "worker_id")
#: The columns that hold JSON.
JSON_COLUMNS = ("key", "run_metadata", "attempts", "progress")


def job_definition() -> str:
    """The definition of `~jobs`."""
    statuses = ",".join(f"'{status}'" for status in STATUSES)
    return """# {mark}
    table_name : varchar(255)  # the table whose make() is to be called
    key_hash : char(32)  # hash of the key
    ---
    status : enum({statuses})  # what is to be done, is being done, or came of it
    key=null : {json}  # the key for make()
    error_message="" : varchar({error_message_length})  # what the last failed attempt said
    error_stack=null : {blob}  # its stack trace
    user="" : varchar(255)  # database user of who scheduled or runs the job
    host="" : varchar(255)  # and the host
    pid=0 : {big}  # and the process
    connection_id=0 : {big}  # and the database connection
    timestamp=CURRENT_TIMESTAMP(6) : datetime(6)  # when the status changed last
    run_duration=null : {real}  # seconds that the last attempt took
    run_metadata=null : {json}  # versions and machine of the last attempt
    priority=5 : {small}  # lower is more urgent
    turn=null : {big}  # jobs are claimed by this number, the lowest first; null before the due time
    job_group="" : varchar(255)  # the group that the job belongs to
    due_time=CURRENT_TIMESTAMP(6) : datetime(6)  # not before this time; also the order of scheduling
    created_time=null : datetime(6)  # when the job was scheduled
    attempt=0 : {whole}  # how many attempts were used up
    attempts=null : {json}  # what came of each
    worker_id=null : char(36)  # who holds the claim
    claim=0 : {big}  # and the number of the claim, which only grows
    cancel_request="" : varchar(16)  # what the running job was asked
    progress=null : {json}  # how far the running job is
    run_id=null : {big}  # the run that it belongs to
    automatic=0 : {small}  # 1 if an event put it there, and nobody has asked for it
    index (table_name, status, turn, due_time, run_id)
    """.format(
        mark=UNFINISHED_MARK,
        statuses=statuses,
        error_message_length=ERROR_MESSAGE_LENGTH,
        **datajoint_api.types,
    )


def job_columns(connection: Any, engine: Engine) -> dict[str, str]:
    """The columns of `~jobs` as SQL declares them. Texts have the character set that they should have."""
    return _columns(job_definition(), connection, engine)


def columns_of(table: QueueTable, engine: Engine) -> dict[str, str]:
    """The same of another table of the queue."""
    return _columns(table.definition, table.connection, engine)


def _columns(definition: str, connection: Any, engine: Engine) -> dict[str, str]:
    declarations = datajoint_api.column_sql(definition, connection)
    return dict(engine.tables.column(declaration, ASCII_COLUMNS) for declaration in declarations)


class QueueTable(Table):
    """A table of the queue in one schema."""

    _name: str

    def __init__(self, connection: Any, database: str) -> None:
        set_up(self, connection, database, self._name)

    @property
    def table_name(self) -> str:
        return self._name

    def preview(self, limit: int | None = None, width: int | None = None) -> str:
        """The first rows as text."""
        return preview(self._legible, limit, width)

    def _repr_html_(self) -> str:
        return repr_html(self._legible)

    @property
    def _legible(self) -> Any:
        """The same rows with JSON as text. Otherwise DataJoint would show only the word "json"."""
        view = self.proj(...)
        for name, attribute in view.heading.attributes.items():
            if attribute.json:
                change_attribute(view.heading, name, json=False, type="text")
        return view

    def delete(self, *_: Any, **__: Any) -> None:
        """Delete the rows without prompting, as DataJoint's own job tables do."""
        self.delete_quick()

    def drop(self, *_: Any, **__: Any) -> None:
        """Drop the table without prompting."""
        self.drop_quick()


class Jobs(QueueTable):
    """`~jobs` of a schema, or the jobs of one table in it. A DataJoint query like any other."""

    _name = "~jobs"

    def restrict(self, restriction: Any, **options: Any) -> Any:
        """As on every DataJoint query. But a dict with an unknown attribute is an error, and does not choose all."""
        in_all(restriction, lambda condition: self._insist_on_known(_names_in(condition)))
        return super().restrict(restriction, **options)

    def _insist_on_known(self, names: set[str]) -> None:
        unknown = names - set(self.heading.names)
        if unknown:
            self._refuse(min(unknown))

    def _refuse(self, name: str) -> None:
        known = self.heading.names
        nearest = get_close_matches(name, known, 1)
        hint = f"Did you mean {nearest[0]!r}?" if nearest else f"There are {', '.join(known)}."
        raise DjJobsError(
            f"The jobs of {self._whose} have no attribute {name!r}. {hint} Nothing was chosen or changed."
        )

    @property
    def _whose(self) -> str:
        return f"the schema {self.database} (Table.jobs has the attributes of a table's key)"

    def delete_quick(self, get_count: bool = False) -> int | None:
        """Delete these jobs. The worker of a running job then commits nothing."""
        running = len(self.reserved)
        count = super().delete_quick(get_count=True)
        control = JobControl(self.connection, self.database)
        if count and control.is_declared:
            # Let their keys be scheduled again at once.
            engine = engine_for(datajoint_api.backend(self.connection))
            self.connection.query(engine.render(engine.control.forget_all_schedulings, control=control.full_table_name))
        if running:
            tell_of_running(running, f"the schema {self.database}")
        return count if get_count else None

    @property
    def definition(self) -> str:
        return job_definition()

    def _with_status(self, status: str) -> Jobs:
        return self & f"status='{status}'"

    @property
    def scheduled(self) -> Jobs:
        """Jobs that wait for a worker or for their due time."""
        return self._with_status("scheduled")

    @property
    def reserved(self) -> Jobs:
        """Jobs that a worker has."""
        return self._with_status("reserved")

    @property
    def errors(self) -> Jobs:
        """Jobs that failed."""
        return self._with_status("error")

    @property
    def ignored(self) -> Jobs:
        """Jobs that are to be left alone."""
        return self._with_status("ignore")

    @property
    def completed(self) -> Jobs:
        """Jobs that succeeded, where these are kept."""
        return self._with_status("success")

    @property
    def cancelled(self) -> Jobs:
        """Jobs that were cancelled."""
        return self._with_status("cancelled")


def tell_of_running(count: int, whose: str) -> None:
    """Say that jobs were deleted that workers had."""
    logger.warning(
        "%d of the deleted jobs of %s were running. Their workers cannot commit any more; the next scheduling puts the "
        "keys back.",
        count,
        whose,
    )


def in_all(restriction: Any, change: Callable[[Any], Any]) -> Any:
    """A restriction with each of its conditions replaced by what `change` makes of it."""
    if isinstance(restriction, Not):
        return Not(in_all(restriction.restriction, change))
    if isinstance(restriction, AndList):
        return AndList([in_all(condition, change) for condition in restriction])
    if isinstance(restriction, (list, tuple, set)):
        return [in_all(condition, change) for condition in restriction]
    return change(restriction)


def _names_in(condition: Any) -> set[str]:
    """The attributes that a dict or a record names; `key.subject` looks into the JSON of `key`."""
    if isinstance(condition, np.void):
        return set(condition.dtype.names or ())
    names = condition if isinstance(condition, Mapping) else ()
    return {re.split(r"[.:]", str(name), maxsplit=1)[0] for name in names}


class JobControl(QueueTable):
    """`~jobs_control`: who schedules a table, and when it was scheduled last."""

    _name = "~jobs_control"

    @property
    def definition(self) -> str:
        return f"""# djjobs: who schedules the tables of {self.database}, and when; all times are UTC
        table_name : varchar(255)
        scope : varchar(32)  # which keys and how: empty for all keys, else a hash of the restrictions
        ---
        last_scheduled=null : datetime(6)  # when a scheduling ended last
        scheduling_until=null : datetime(6)  # a scheduling runs, or was begun and will not be waited for after this
        scheduling_by=null : char(36)  # who schedules
        paused=null : datetime(6)  # since when no job is given out
        """


class Workers(QueueTable):
    """`~workers`: who works on the jobs of this schema, and when each was heard of last."""

    _name = "~workers"
    json_columns = ("tables",)

    #: Columns that earlier versions had.
    dropped_columns = ("missed",)

    @property
    def definition(self) -> str:
        return """# djjobs: the workers of {database}; all times are UTC
        worker_id : char(36)
        ---
        user="" : varchar(255)  # the database user
        host="" : varchar(255)
        pid=0 : {big}
        started=null : datetime(6)
        last_heartbeat=null : datetime(6)
        beats=0 : {big}  # how many heartbeats it has sent
        lease=60 : {real}  # seconds without a heartbeat after which the worker counts as dead
        state="working" : varchar(16)  # working, stopping or dead
        slots=1 : {whole}  # how many jobs it can run side by side
        tables=null : {json}  # whose jobs it runs
        cluster_job="" : varchar(255)  # the cluster's number for it
        calls=0 : {big}  # how often it was asked to look for requests
        """.format(database=self.database, **datajoint_api.types)


class Sightings(QueueTable):
    """`~sightings`: which heartbeats were seen from a machine, by those who look only once."""

    _name = "~sightings"

    @property
    def definition(self) -> str:
        return """# djjobs: who has seen which workers of {database}; all times are UTC
        boot : char(36)  # the machine, from its last start on
        ---
        seen=null : {json}  # of each worker the heartbeat, and since when it is the same by the machine's own clock
        last_seen=null : datetime(6)
        """.format(database=self.database, **datajoint_api.types)


class Runs(QueueTable):
    """`~runs`: what each scheduling put into the queue, and what its table's hooks made of it."""

    _name = "~runs"
    json_columns = ("details", "results")

    @property
    def definition(self) -> str:
        return """# djjobs: the runs of {database}; all times are UTC
        run_id : {big}
        ---
        table_name : varchar(255)  # the table whose jobs these are
        name="" : varchar({name_length})  # what whoever asked for it calls it
        restriction="" : varchar({restriction_length})  # which keys were asked for
        user="" : varchar(255)  # the database user who asked
        host="" : varchar(255)
        pid=0 : {big}
        created=null : datetime(6)
        due_time=null : datetime(6)  # its jobs are not run before
        total=0 : {whole}  # how many jobs it put into the queue
        cancel_time=null : datetime(6)  # when it was cancelled
        retry_time=null : datetime(6)  # when jobs of it were put back by hand
        ended_time=null : datetime(6)  # when it was seen to be over
        details=null : {json}  # what prepare_run returned
        results=null : {json}  # what finish_run returned
        error="" : varchar({error_message_length})  # what finish_run failed with
        prepared_time=null : datetime(6)  # when prepare_run was over
        prepare_worker=null : char(36)  # who calls it
        prepare_claim=null : {big}  # by which claim
        prepare_job=null : char(32)  # in the name of which job
        finish=0 : {small}  # 1 as long as finish_run is to be called
        finish_worker=null : char(36)  # who calls it
        finish_claim=null : {big}  # by a claim number of which slot
        finish_since=null : datetime(6)
        finish_tries=0 : {whole}  # how often it was called
        index (table_name, ended_time)
        """.format(
            database=self.database,
            name_length=RUN_NAME_LENGTH,
            restriction_length=RESTRICTION_LENGTH,
            error_message_length=ERROR_MESSAGE_LENGTH,
            **datajoint_api.types,
        )


class Schedules(QueueTable):
    """`~schedules`: what is to be done in this schema from time to time."""

    _name = "~schedules"

    @property
    def definition(self) -> str:
        return """# djjobs: what is done from time to time in {database}; all times are UTC
        name : varchar(100)
        ---
        target : varchar(255)  # the tables, as `module` or `module:Table`
        what : varchar(16)  # jobs, cleanup or both
        every=null : {real}  # seconds from one due time to the next
        cron="" : varchar(255)  # or a cron line
        timezone="UTC" : varchar(64)  # the time zone of the cron line
        enabled=1 : {small}  # 0 while paused
        created_by="" : varchar(255)  # the database user
        created=null : datetime(6)
        next_time : datetime(6)  # when it is due
        last_time=null : datetime(6)  # the due time of the last firing
        last_state="" : varchar(16)  # running, done, failed or skipped
        last_outcome="" : varchar({length})  # and what came of it
        """.format(database=self.database, length=ERROR_MESSAGE_LENGTH, **datajoint_api.types)


class Firings(QueueTable):
    """`~firings`: the history of the schedules, one row a firing."""

    _name = "~firings"

    @property
    def definition(self) -> str:
        return """# djjobs: the firings of the schedules of {database}; all times are UTC
        name : varchar(100)  # of the schedule
        fire_time : datetime(6)  # when it was due, or asked for
        ---
        state : varchar(16)  # running, done, failed or skipped
        running=null : {small}  # 1 while it runs: a schedule has no more than one such firing
        missed_since=null : datetime(6)  # it also makes up for what was due from then on, when nobody ran
        by_hand=0 : {small}  # 1 if somebody asked for it
        attempt=1 : {whole}  # how often it was begun: once more each time its process died
        runner=null : char(36)  # the token of the process that runs it
        expires=null : datetime(6)  # until when that process is taken to be alive
        user="" : varchar(255)  # its database user
        host="" : varchar(255)  # and the host
        pid=0 : {big}  # and the process
        started=null : datetime(6)
        ended=null : datetime(6)
        outcome="" : varchar({length})
        unique index (name, running)
        """.format(database=self.database, length=ERROR_MESSAGE_LENGTH, **datajoint_api.types)


class Leader(QueueTable):
    """`~leader`: the scheduler that fires the schedules of this schema, as long as it is heard of."""

    _name = "~leader"

    @property
    def definition(self) -> str:
        return """# djjobs: who fires the schedules of {database}; all times are UTC
        role : varchar(16)
        ---
        leader="" : char(36)
        user="" : varchar(255)  # the database user
        host="" : varchar(255)
        pid=0 : {big}
        since=null : datetime(6)
        expires : datetime(6)  # another may take over after this
        """.format(database=self.database, **datajoint_api.types)
