"""The statements about the hooks of runs: who prepares a run, who finishes it, and which runs are over."""

from __future__ import annotations

from .runs import NONE_OPEN, NOT_AMONG_OPEN


class HookStatements:
    """Marks in the rows of `~runs`. A mark says who calls a hook.

    Before a mark is taken, a statement of its own locks the row of the run. The statement after it then sees all that
    the former owner of the lock has done, on every engine.
    """

    lock_preparing = """
        SELECT prepared_time, prepare_worker, prepare_claim, prepare_job FROM {runs}
        WHERE run_id = %(run)s FOR UPDATE"""

    #: The mark to prepare a run was set in the name of a job. It is valid as long as that claim has the job reserved.
    take_preparing = """
        UPDATE {runs} AS run SET prepare_worker = %(worker)s, prepare_claim = %(claim)s, prepare_job = %(key_hash)s
        WHERE run.run_id = %(run)s AND run.prepared_time IS NULL
          AND NOT EXISTS (SELECT 1 FROM {jobs} AS job
                          WHERE job.table_name = %(table)s AND job.key_hash = run.prepare_job
                            AND job.run_id = run.run_id AND job.status = 'reserved'
                            AND job.worker_id = run.prepare_worker AND job.claim = run.prepare_claim)"""

    end_preparing = """
        UPDATE {runs} SET details = %(details)s, prepared_time = {now}
        WHERE run_id = %(run)s AND prepared_time IS NULL AND prepare_worker = %(worker)s
          AND prepare_claim = %(claim)s AND prepare_job = %(key_hash)s"""

    #: The run is not marked as ended, and nobody finishes it now. The mark to finish a run is valid as long as its
    #: worker lives. Whoever finds that the worker is dead takes the mark away.
    _left_alone = "run.ended_time IS NULL AND (run.finish = 0 OR run.finish_worker IS NULL)"

    #: The runs that are over: some of them, and all of a table.
    _find_over = f"""
        SELECT run.run_id, run.finish FROM {{runs}} AS run
        WHERE {_left_alone} AND """
    find_over = _find_over + f"run.run_id IN %(runs)s AND {NONE_OPEN} ORDER BY run.created"
    find_over_in_table = _find_over + f"run.table_name = %(table)s AND {NOT_AMONG_OPEN} ORDER BY run.created"

    end_run = f"""
        UPDATE {{runs}} AS run SET ended_time = {{now}}
        WHERE run.run_id = %(run)s AND run.finish = 0 AND run.ended_time IS NULL AND {NONE_OPEN}"""

    lock_finishing = """
        SELECT finish_worker, finish_claim, finish_tries FROM {runs}
        WHERE run_id = %(run)s AND finish = 1 FOR UPDATE"""

    take_finishing = f"""
        UPDATE {{runs}} AS run SET finish_worker = %(worker)s, finish_claim = %(claim)s, finish_since = {{now}},
               finish_tries = run.finish_tries + 1
        WHERE run.run_id = %(run)s AND run.finish = 1 AND {_left_alone} AND {NONE_OPEN}"""

    _no_mark = "finish_worker = NULL, finish_claim = NULL, finish_since = NULL"
    _finished_by_me = """
        WHERE run_id = %(run)s AND finish = 1 AND finish_worker = %(worker)s AND finish_claim = %(claim)s"""

    end_finishing = (
        f"UPDATE {{runs}} SET finish = 0, ended_time = {{now}}, results = %(results)s, error = '', {_no_mark}"
        + _finished_by_me
    )
    #: After too many tries the run ends with the error.
    fail_finishing = (
        f"""
        UPDATE {{runs}} SET finish = CASE WHEN finish_tries >= %(most)s THEN 0 ELSE 1 END,
               ended_time = CASE WHEN finish_tries >= %(most)s THEN {{now}} END, error = %(message)s, {_no_mark}"""
        + _finished_by_me
    )
    give_back_finishing = f"UPDATE {{runs}} SET finish_tries = finish_tries - 1, {_no_mark}" + _finished_by_me

    #: A slot has died. Others may finish the runs that it was finishing.
    _finished_by_slot = (
        "ended_time IS NULL AND finish_worker = %(worker)s AND finish_claim BETWEEN %(first)s AND %(last)s"
    )
    find_finishing = "SELECT run_id FROM {runs} WHERE table_name IN %(tables)s AND " + _finished_by_slot
    release_finishing = f"UPDATE {{runs}} SET {_no_mark} WHERE run_id IN %(runs)s AND {_finished_by_slot}"
