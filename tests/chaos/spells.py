"""Spells: for a while the server lives and does not do what it should.

Each runs in a thread of its own. To lock a table, or to make the server read-only, may take as long as some worker's
transaction, and meanwhile other faults happen.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

from chaos.record import Record, Spell
from chaos.server import USER, Bystander, execute

#: How often a spell is tried that the server refuses: a deadlock, or a lock that could not be had.
_TRIES = 3

Act = Callable[[], Any]


class Spells:
    """Makes spells happen, one at a time.

    Parameters
    ----------
    length : float
        How long one lasts, at least; longer than the lease.
    short : float
        How long one lasts that only some workers suffer from; shorter than the lease. The others rightly take a worker
        for dead that cannot send a heartbeat for a lease while they can.
    """

    def __init__(self, server: Any, bystander: Bystander, record: Record, length: float, short: float) -> None:
        self._server, self._bystander, self._record = server, bystander, record
        self._length, self._short = length, short
        self._enough = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, kind: str, whom: float, how: float) -> None:
        """Let a spell begin; the numbers between 0 and 1 say which one, and how long it lasts."""
        chance = random.Random(whom)
        begin, end = {
            "read-only spell": self._read_only,
            "lock tables": self._lock_tables,
            "stall server": self._stall,
            "limit connections": self._limit_connections,
        }[kind](chance)
        length = self._short if kind == "limit connections" else self._length * (1 + how / 2)
        self._thread = threading.Thread(target=self._cast, args=(self._record.begin(kind), begin, end, length))
        self._thread.start()

    def stop(self) -> None:
        """End the spell that is on, if there is one."""
        self._enough.set()
        if self._thread is not None:
            self._thread.join()
        self._enough.clear()

    def _cast(self, spell: Spell, begin: Act, end: Act, length: float) -> None:
        try:
            if self._begun(spell, begin):
                done = self._record.done
                done[spell.kind] = done.get(spell.kind, 0) + 1
                self._enough.wait(length)
        finally:
            end()
            self._record.end(spell)

    def _begun(self, spell: Spell, begin: Act) -> bool:
        for _ in range(_TRIES):
            try:
                begin()
                self._record.tell(f"{spell.kind}: begun")
                return True
            except Exception as error:
                self._record.tell(f"{spell.kind} could not begin: {error}")
        return False

    # -- by statements -----------------------------------------------------------------------------------------

    def _statements(self, begin: list[str], end: list[str]) -> tuple[Act, Act]:
        """What these statements begin and end, on a connection that lives as long as the spell."""
        connection = self._bystander.connect()

        def act(statements: list[str]) -> None:
            for sql in statements:
                execute(connection, sql)

        def undo() -> None:
            act(end)
            connection.close()

        return lambda: act(begin), undo

    def _read_only(self, chance: random.Random) -> tuple[Act, Act]:
        if self._bystander.is_postgresql:
            begin = ["ALTER SYSTEM SET default_transaction_read_only = on", "SELECT pg_reload_conf()"]
            return self._statements(begin, ["ALTER SYSTEM RESET default_transaction_read_only", begin[1]])
        super_too = self._bystander.has_super_read_only and chance.random() < 0.5
        name = "super_read_only" if super_too else "read_only"
        return self._statements([f"SET GLOBAL {name} = ON"], [f"SET GLOBAL {name} = OFF", "SET GLOBAL read_only = OFF"])

    def _lock_tables(self, chance: random.Random) -> tuple[Act, Act]:
        """As a dump does it, or somebody who adds a column."""
        some = chance.choice((["~jobs"], ["~workers"], ["__square", "entry"], self._bystander.tables()))
        names = [self._bystander.table(name) for name in some]
        if self._bystander.is_postgresql:
            mode = chance.choice(("EXCLUSIVE", "ACCESS EXCLUSIVE"))
            # A transaction that could not get its locks has to be ended first.
            begin = ["ROLLBACK", "SET lock_timeout = '15s'", "BEGIN", f"LOCK TABLE {', '.join(names)} IN {mode} MODE"]
            return self._tell_of(begin[-1], *self._statements(begin, ["ROLLBACK"]))
        mode = chance.choice(("READ", "WRITE"))
        lock = f"LOCK TABLES {', '.join(f'{name} {mode}' for name in names)}"
        lock = chance.choice((lock, lock, "FLUSH TABLES WITH READ LOCK"))
        return self._tell_of(lock, *self._statements(["SET lock_wait_timeout = 15", lock], ["UNLOCK TABLES"]))

    def _tell_of(self, sql: str, begin: Act, end: Act) -> tuple[Act, Act]:
        self._record.tell(sql)
        return begin, end

    def _limit_connections(self, chance: random.Random) -> tuple[Act, Act]:
        """Some connections are cut, and there is no room for new ones."""
        connections = self._bystander.connections()
        most, chosen = len(connections) // 2, chance.sample(connections, len(connections) // 3)
        self._record.note_cut(len(chosen))
        if self._bystander.is_postgresql:
            limit, usual = f"ALTER ROLE {USER} CONNECTION LIMIT {{}}", -1
        else:
            limit, usual = "SET GLOBAL max_connections = {}", self._bystander.ask("SELECT @@max_connections")[0][0]
        begin, end = self._statements([limit.format(max(10, most))], [limit.format(usual)])

        def begin_and_cut() -> None:
            begin()
            self._bystander.cut(chosen)

        return begin_and_cut, end

    # -- by signals --------------------------------------------------------------------------------------------

    def _stall(self, _: random.Random) -> tuple[Act, Act]:
        """All processes of the server stand still; who wants to connect is not refused and gets no answer."""
        stopped: list[int] = []

        def stop() -> None:
            # PostgreSQL has a process for each connection. Its first process goes first: then there are no new ones.
            main = psutil.Process(self._server.pid)
            _signal([main.pid], signal.SIGSTOP)
            stopped.append(main.pid)
            children = [child.pid for child in main.children(recursive=True)]
            _signal(children, signal.SIGSTOP)
            stopped.extend(children)

        return stop, lambda: _signal(reversed(stopped), signal.SIGCONT)


def _signal(pids: Any, number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
