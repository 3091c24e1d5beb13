"""The statements that claim jobs."""

from __future__ import annotations


class ClaimStatements:
    """How the next jobs are found, locked and reserved."""

    #: What `{direction}` is for each order. A claim at random takes the jobs that it has not met in order.
    direction = {"original": "ASC", "reverse": "DESC", "random": "ASC"}
    #: What `{order}` is for each order.
    order = {
        "original": "job.due_time ASC",
        "reverse": "job.due_time DESC",
        "random": "job.key_hash < %(start)s, job.key_hash",
    }

    @staticmethod
    def only(automatic: bool, priority: bool = False, alias: str = "") -> str:
        """Which jobs may be claimed, for `{only}` and `{asked_for}`.

        Parameters
        ----------
        automatic : bool
            Whether jobs count that only an event has put into the queue.
        priority : bool
            Whether jobs that are less urgent than the parameter `priority` do not count. Defaults to False.
        alias : str
            The alias of the jobs. Defaults to none.
        """
        job = f"{alias}." if alias else ""
        # The turn of a retry is its priority less a thousand.
        urgent = f"AND ({job}turn BETWEEN 0 AND %(priority)s OR {job}turn <= %(priority)s - 1000)"
        asked_for = f"AND {job}automatic = 0"
        return " ".join([urgent] * priority + [asked_for] * (not automatic))

    #: The lowest turn above `floor` that a job has, and whether the first job without a turn has become due.
    next_turn = """
        SELECT (SELECT {catalog}MIN(turn) FROM {jobs}
                WHERE table_name = %(table)s AND status = 'scheduled' AND turn > %(floor)s {only}),
               (SELECT due_time <= {now} FROM {jobs} {use_order_index}
                WHERE table_name = %(table)s AND status = 'scheduled' AND turn IS NULL
                ORDER BY {due_first} LIMIT 1)"""

    pick_due = """
        SELECT key_hash FROM {jobs} {use_order_index}
        WHERE table_name = %(table)s AND status = 'scheduled' AND turn IS NULL AND due_time <= {now}
        ORDER BY {due_first} LIMIT %(count)s FOR UPDATE SKIP LOCKED"""

    #: Give a turn to jobs that have become due. A retry gets a turn before all new jobs.
    give_turns = """
        UPDATE {jobs} SET turn = priority - CASE WHEN attempt > 0 THEN 1000 ELSE 0 END
        WHERE table_name = %(table)s AND key_hash IN %(hashes)s AND status = 'scheduled'"""

    #: Lock the first jobs of a turn. They come in the order of the index, so nothing is sorted and no other row is
    #: locked.
    pick_in_order = """
        SELECT key_hash, {key}, attempt, priority, {seconds_since[due_time]}, run_id FROM {jobs} {use_order_index}
        WHERE table_name = %(table)s AND status = 'scheduled' AND turn = %(turn)s {asked_for}
        ORDER BY due_time {direction} LIMIT %(count)s FOR UPDATE SKIP LOCKED"""

    #: Jobs of a turn among the next rows after a random hash. Hashes are uniform, so every job has the same chance.
    #: At most `window` rows are looked at: the others may have other turns, or may be done.
    find_near = """
        SELECT near.key_hash
        FROM (SELECT key_hash, status, turn, automatic FROM {jobs} {use_primary}
              WHERE table_name = %(table)s AND key_hash >= %(start)s
              ORDER BY key_hash LIMIT %(window)s) AS near
        WHERE near.status = 'scheduled' AND near.turn = %(turn)s {asked_for} LIMIT %(count)s"""

    pick_these = """
        SELECT key_hash, {key}, attempt, priority, {seconds_since[due_time]}, run_id FROM {jobs}
        WHERE table_name = %(table)s AND key_hash IN %(hashes)s AND status = 'scheduled' AND turn IS NOT NULL
        LIMIT %(count)s FOR UPDATE SKIP LOCKED"""

    #: Some of the scheduled jobs that a restriction chooses. They are not locked, so sorting them does no harm.
    find_chosen = """
        SELECT job.key_hash FROM {jobs} AS job JOIN ({chosen}) AS chosen ON chosen.key_hash = job.key_hash
        WHERE job.table_name = %(table)s AND job.status = 'scheduled' AND job.turn IS NOT NULL {only}
        ORDER BY job.turn, {order} LIMIT %(count)s"""

    reserve = """
        UPDATE {jobs} SET status = 'reserved', worker_id = %(worker)s, claim = %(claim)s, {user} = %(user)s,
               host = %(host)s, pid = %(pid)s, connection_id = %(connection_id)s, timestamp = {now}{versioned}
        WHERE table_name = %(table)s AND key_hash IN %(hashes)s AND status = 'scheduled'"""
    #: As `{versioned}`, if the version of the code is known: everybody can see it while the job runs.
    with_version = ", run_metadata = %(metadata)s"

    release_claim = """
        UPDATE {jobs} SET status = 'scheduled', worker_id = NULL, timestamp = {now}
        WHERE table_name = %(table)s AND status = 'reserved' AND worker_id = %(worker)s AND claim = %(claim)s"""

    count_scheduled = """
        SELECT {catalog}COUNT(*) FROM {jobs}
        WHERE table_name = %(table)s AND status = 'scheduled' AND turn IS NOT NULL {only}"""

    count_chosen = """
        SELECT {catalog}COUNT(*) FROM {jobs} AS job JOIN ({chosen}) AS chosen ON chosen.key_hash = job.key_hash
        WHERE job.table_name = %(table)s AND job.status = 'scheduled' AND job.turn IS NOT NULL {only}"""
