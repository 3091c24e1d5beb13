"""Ctrl-Z in a terminal: the slots have process groups of their own, so who supervises them passes it on."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType

__all__ = ["follow", "unfollow"]

#: Each gives the process groups of the slots that somebody in this process supervises.
_followed: list[Callable[[], Iterable[int]]] = []


def follow(groups: Callable[[], Iterable[int]]) -> None:
    """From now on these groups are suspended with this process, and go on with it.

    Only where Ctrl-Z suspends this process in the usual way, and in the main thread, where Python lets handlers be set.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
        signal.signal(signal.SIGTSTP, _suspend)
    _followed.append(groups)


def unfollow(groups: Callable[[], Iterable[int]]) -> None:
    """These groups are gone."""
    if groups in _followed:
        _followed.remove(groups)
        if not _followed:
            _forget()


def _suspend(number: int, frame: FrameType | None) -> None:
    _send_all(signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    # Somebody has let this process go on.
    _send_all(signal.SIGCONT)


def _send_all(number: int) -> None:
    for groups in list(_followed):
        for group in groups():
            with contextlib.suppress(OSError):
                os.killpg(group, number)


def _forget() -> None:
    _followed.clear()
    if signal.getsignal(signal.SIGTSTP) is _suspend:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)


# A forked process supervises nobody.
os.register_at_fork(after_in_child=_forget)
