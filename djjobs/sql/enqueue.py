"""The statements that put jobs into the queue."""

from __future__ import annotations

from typing import ClassVar

from .keys import KeySQL


class EnqueueStatements:
    """How new jobs are found and inserted, and how jobs of events are given to a run."""

    #: Insert every key of key_source that is neither in the target nor, by its hash, in the queue. Each job is due a
    #: microsecond after the one before it: this is the order of the jobs. The hash is computed once for each key, in
    #: the subquery. The last ORDER BY makes the server find all keys before it inserts the first one. Without it,
    #: PostgreSQL might search the growing queue once for each key.
    schedule_new = """
        INSERT {join_memory}INTO {jobs} (table_name, key_hash, status, {key}, {user}, host, pid, connection_id,
                            timestamp, priority, turn, due_time, created_time, run_id, automatic)
        SELECT %(table)s, todo._hash, %(status)s, {json}, %(user)s, %(host)s, %(pid)s, %(connection_id)s,
               {now}, %(priority)s, {turn}, {due} + {due_offset}, {now}, %(run)s, %(automatic)s
        FROM (SELECT {hash} AS _hash, source.*{numbered} FROM ({source}) AS source
              WHERE NOT {is_made} {computed_once}) AS todo
        WHERE NOT EXISTS (SELECT 1 FROM {jobs} AS queued
                          WHERE {queued_here} AND queued.key_hash = todo._hash {one_by_one})
        ORDER BY todo._hash"""
    #: The same, but it skips jobs that others insert at the same time.
    schedule_new_carefully = schedule_new + " {or_skip[table_name]}"

    #: The jobs that keys are compared with, as `{queued_here}`: looked up in the index for each key, or read all at
    #: once.
    queued_by_index = "queued.table_name = %(table)s"
    queued_at_once = queued_by_index
    #: At the end of a subquery: the server runs it once for each of a few rows, and does not read the whole queue.
    one_by_one = ""
    #: How much later than the first job a job is due, as `{due_offset}`; and the number of each key for it, as
    #: `{numbered}`, if the server has to count all keys and not only the new ones.
    due_offset: ClassVar[str]
    numbered = ""

    #: Whether the server takes the queue for shorter than it is now, and the statement that makes it look. Both are
    #: empty if the engine finds out by itself in time.
    underestimates = ""
    look_at_queue = ""

    #: The jobs that events have put there, and that nobody has asked for.
    find_automatic = """
        SELECT job.key_hash FROM {jobs} AS job {use_order_index} {join_chosen}
        WHERE job.table_name = %(table)s AND job.status = 'scheduled' AND job.automatic = 1"""
    #: Those of them that nobody has begun or is claiming now, and their runs. They are locked, so that this stays true.
    lock_automatic = """
        SELECT key_hash, run_id FROM {jobs}
        WHERE table_name = %(table)s AND key_hash IN %(hashes)s AND status = 'scheduled' AND automatic = 1
          AND attempt = 0
        FOR UPDATE SKIP LOCKED"""
    #: Such jobs become part of a run that somebody has asked for, and get its priority.
    take_along = "run_id = %(run)s, priority = %(priority)s, automatic = 0, turn = {turn}"
    #: The same for a run with a due time.
    take_along_later = take_along + ", due_time = {due}"

    def new_keys(self, keys: KeySQL, few: bool, restricted: bool) -> dict[str, str]:
        """The parts of `schedule_new` that are about the keys.

        Parameters
        ----------
        few : bool
            Whether few keys are expected.
        restricted : bool
            Whether a restriction chooses them.
        """
        return {
            "source": keys.source,
            "is_made": keys.is_made(),
            "hash": keys.hash("source"),
            "json": keys.stored_json("todo"),
            "due_offset": self.due_offset.format(order=keys.order("todo")),
            "numbered": self.numbered.format(order=keys.order("source")),
            "queued_here": self.queued_by_index if restricted else self.queued_at_once,
            "one_by_one": self.one_by_one if few else "",
        }
