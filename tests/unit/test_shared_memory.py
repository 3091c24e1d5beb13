"""What a slot and its monitor tell each other through memory, also when the slot was killed in the middle."""

from __future__ import annotations

import json
import os

from djjobs.work.shared_memory import LONGEST_PROGRESS, SharedMemory, Started

FIRST, SECOND = Started(1.5, 7, "a" * 32, 0), Started(2.5, 8, "b" * 32, 3)


def test_what_was_written_last_is_read() -> None:
    memory = SharedMemory()
    assert memory.read() is None
    for started in (FIRST, SECOND, FIRST, None, SECOND):
        memory.write(started)
        assert memory.read() == started


def test_another_process_reads_it_also_after_its_end() -> None:
    memory = SharedMemory()
    pid = os.fork()
    if not pid:
        memory.write(SECOND)
        memory.write_progress('{"done": 1}')
        os._exit(0)
    os.waitpid(pid, 0)
    assert (memory.read(), memory.read_progress()) == (SECOND, '{"done": 1}')


def test_another_process_reads_from_which_claim_on_the_slot_holds_them() -> None:
    memory = SharedMemory()
    assert memory.read_holding() == 0
    pid = os.fork()
    if not pid:
        memory.write_holding(3 * 2**40 + 17)
        memory.write(FIRST)
        os._exit(0)
    os.waitpid(pid, 0)
    assert (memory.read_holding(), memory.read()) == (3 * 2**40 + 17, FIRST)


def test_a_new_job_has_said_nothing_of_its_progress_and_has_not_yielded() -> None:
    memory = SharedMemory()
    memory.write(FIRST)
    memory.write_progress('"half"')
    memory.write_yielded()
    assert (memory.read_progress(), memory.has_yielded) == ('"half"', True)
    memory.write(SECOND)
    assert (memory.read_progress(), memory.has_yielded) == (None, False)


def test_a_progress_comes_back_and_one_that_was_written_by_two_at_once_counts_as_none() -> None:
    memory = SharedMemory()
    for text in ("{}", json.dumps({"note": "übergrößig \N{SNOWMAN}"}), json.dumps("x" * (LONGEST_PROGRESS - 2))):
        memory.write_progress(text)
        assert memory.read_progress() == text
    memory.write_progress('{"done": 1')
    assert memory.read_progress() is None


def test_a_slot_that_has_ended_says_whether_it_may_still_hold_claims() -> None:
    memory = SharedMemory()
    assert not memory.may_hold
    memory.write_holding(7, any_later=True)
    assert (memory.may_hold, memory.read_holding()) == (True, 7)
    memory.write_holding(8)
    assert not memory.may_hold
    memory.write(FIRST)
    assert memory.may_hold
