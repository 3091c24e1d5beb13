"""The statements that put jobs into the queue."""

from __future__ import annotations

from typing import ClassVar

from .keys import KeySQL


class EnqueueStatements:
    """How new jobs are found and inserted, and how jobs of events are given to a run."""

    #: Insert every key of key_source that is neither in the target nor, by its hash, in the queue. Each hash is
    #: computed once, not anew wherever it is used. The moment a job is due also gives its place in line, so each row is
    #: due a microsecond after the last. The last ORDER BY has all keys found before the first is inserted: PostgreSQL
    #: might else search the growing queue for each of them.
    schedule_new = """
        INSERT {hint}INTO {jobs} (table_name, key_hash, status, {key}, {user}, host, pid, connection_id,
                            timestamp, priority, turn, due_time, created_time, run_id, automatic)
        SELECT %(table)s, todo._hash, %(status)s, {json}, %(user)s, %(host)s, %(pid)s, %(connection_id)s,
               {now}, %(priority)s, {turn}, {due} + {place}, {now}, %(run)s, %(automatic)s
        FROM (SELECT {hash} AS _hash, source.*{numbered} FROM ({source}) AS source
              WHERE NOT {is_made} {computed_once}) AS todo
        WHERE NOT EXISTS (SELECT 1 FROM {jobs} AS queued
                          WHERE {queued_here} AND queued.key_hash = todo._hash {one_by_one})
        ORDER BY todo._hash"""
    #: The same, but it skips jobs that others insert meanwhile.
    schedule_new_carefully = schedule_new + " {or_skip[table_name]}"

    #: Which jobs of the queue keys are compared with: one by one, and all at once.
    these_queued = "queued.table_name = %(table)s"
    all_queued = these_queued
    #: Ends a subquery that is to be asked anew for each of a few rows, whatever the engine thinks of its table.
    one_by_one = ""
    #: Where the keys get their places in line: all of them, inside, or only those that are new, outside.
    numbered = ""
    place: ClassVar[str]

    #: Whether the engine takes the queue for shorter than what was just put into it, and how to have it look; empty
    #: where it finds out by itself in time.
    underestimates = ""
    look_at_queue = ""

    #: The jobs that events put there and that nobody has asked for.
    find_automatic = """
        SELECT job.key_hash FROM {jobs} AS job {use_order_index} {join_chosen}
        WHERE job.table_name = %(table)s AND job.status = 'scheduled' AND job.automatic = 1"""
    #: Those of them that nobody has begun or is just claiming, and their runs; locked, so that both stay so.
    lock_automatic = """
        SELECT key_hash, run_id FROM {jobs}
        WHERE table_name = %(table)s AND key_hash IN %(hashes)s AND status = 'scheduled' AND automatic = 1
          AND attempt = 0
        FOR UPDATE SKIP LOCKED"""
    #: They become part of a run that somebody asked for, and get what was asked for.
    take_along = "run_id = %(run)s, priority = %(priority)s, automatic = 0, turn = {turn}"
    #: The same for a run with a due time.
    take_along_later = take_along + ", due_time = {due}"

    def new_keys(self, keys: KeySQL, few: bool, restricted: bool) -> dict[str, str]:
        """What `schedule_new` says of the keys.

        Parameters
        ----------
        few : bool
            Whether few keys are expected.
        restricted : bool
            Whether they are not all of the table's.
        """
        return {
            "source": keys.source,
            "is_made": keys.is_made(),
            "hash": keys.hash("source"),
            "json": keys.stored_json("todo"),
            "place": self.place.format(order=keys.order("todo")),
            "numbered": self.numbered.format(order=keys.order("source")),
            "queued_here": self.these_queued if restricted else self.all_queued,
            "one_by_one": self.one_by_one if few else "",
        }
