"""Scheduling: all new keys, and again when there is nothing new."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline import Pipeline
from report import Figure
from timing import alternate, timed

__all__ = ["schedule_again", "schedule_new"]

#: DataJoint's scheduling of all keys is measured in one of so many rounds.
_SELDOM = 4

#: What a careful person would write by hand: table, hash, status and key, everything else left to its default.
_BY_HAND = {
    "mysql": """
        INSERT INTO {bare} (table_name, key_hash, status, `key`)
        SELECT '{table}', LEFT(SHA2({json}, 256), 32), 'scheduled', {json}
        FROM {source} AS source
        WHERE NOT EXISTS (SELECT 1 FROM {target} AS target
                          WHERE target.subject = source.subject AND target.session = source.session)
          AND NOT EXISTS (SELECT 1 FROM {bare} AS queued
                          WHERE queued.table_name = '{table}'
                            AND queued.key_hash = CONVERT(LEFT(SHA2({json}, 256), 32) USING ascii))""",
    "postgresql": """
        INSERT INTO {bare} (table_name, key_hash, status, "key")
        SELECT '{table}', left(encode(sha256(({json})::text::bytea), 'hex'), 32), 'scheduled', {json}
        FROM {source} AS source
        WHERE NOT EXISTS (SELECT 1 FROM {target} AS target
                          WHERE target.subject = source.subject AND target.session = source.session)
          AND NOT EXISTS (SELECT 1 FROM {bare} AS queued
                          WHERE queued.table_name = '{table}'
                            AND queued.key_hash = left(encode(sha256(({json})::text::bytea), 'hex'), 32))""",
}
_JSON = {
    "mysql": "JSON_OBJECT('session', source.session, 'subject', source.subject)",
    "postgresql": "jsonb_build_object('session', source.session, 'subject', source.subject)",
}


class _ByHand:
    """The bare INSERT ... SELECT into an empty twin of our queue, with the same columns and indexes."""

    def __init__(self, ours: Pipeline) -> None:
        self._ours, backend = ours, "mysql" if ours.is_mysql else "postgresql"
        self._bare = ours.queue_name.replace("~jobs", "bare")
        like = f"LIKE {ours.queue_name}" if ours.is_mysql else f"(LIKE {ours.queue_name} INCLUDING ALL)"
        self._create = f"CREATE TABLE {self._bare} {like}"
        self._insert = _BY_HAND[backend].format(
            bare=self._bare,
            table=ours.target.table_name,
            source=ours.source.full_table_name,
            target=ours.target.full_table_name,
            json=_JSON[backend],
        )

    def run(self) -> float:
        self._ours.sql(f"DROP TABLE IF EXISTS {self._bare}")
        self._ours.sql(self._create)
        return timed(lambda: self._ours.sql(self._insert))


def schedule_new(ours: Pipeline, theirs: Pipeline, keys: int, rounds: int, cell: str) -> Iterator[Figure]:
    """Both have so many keys. DataJoint needs minutes for 100,000, so it is measured only every now and then."""
    by_hand = _ByHand(ours)

    def run_ours() -> float:
        ours.empty()
        return timed(ours.schedule, expect=keys)

    def run_theirs() -> float:
        theirs.empty()
        return timed(lambda: theirs.target.jobs.refresh()["added"], expect=keys)

    sides = {"ours": run_ours, "bare": by_hand.run, "theirs": run_theirs}
    seconds = alternate(sides, rounds, seldom={"theirs": _SELDOM})
    work = f"schedule {keys:,} new keys"
    rate = {name: f"{keys / median:,.0f} keys/s" for name, median in seconds.items()}
    yield Figure(work, cell, rate["ours"], rate["theirs"], seconds["theirs"] / seconds["ours"], 35)
    yield Figure(
        f"{work}, and the bare INSERT ... SELECT",
        cell,
        f"{seconds['ours']:.2f} s",
        f"{seconds['bare']:.2f} s (bare SQL)",
        seconds["ours"] / seconds["bare"],
        at_most=2,
    )


def schedule_again(ours: Pipeline, theirs: Pipeline, keys: int, rounds: int, cell: str) -> Iterator[Figure]:
    """Both queues hold a job for each key already."""
    for side in (ours, theirs):
        side.empty()
        side.enqueue()
    seconds = alternate(
        {
            "ours": lambda: timed(ours.schedule, expect=0),
            "theirs": lambda: timed(lambda: theirs.target.jobs.refresh()["added"], expect=0),
        },
        rounds,
    )
    yield Figure(
        f"schedule again with {keys:,} pending",
        cell,
        f"{seconds['ours']:.2f} s",
        f"{seconds['theirs']:.2f} s",
        seconds["ours"] / seconds["theirs"],
        at_most=3,
    )
