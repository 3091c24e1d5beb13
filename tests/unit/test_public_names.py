"""What one finds in djjobs by looking."""

from __future__ import annotations

import djjobs
import djjobs.check
import djjobs.worker


def test_dir_shows_the_public_names_and_nothing_else() -> None:
    shown = dir(djjobs)
    assert shown == sorted(shown)
    assert [name for name in shown if not (name.startswith("__") and name.endswith("__"))] == sorted(djjobs.__all__)
    assert {"__doc__", "__all__", "__file__", "__name__", "__path__"} <= set(shown)


def test_every_public_name_is_there_and_documented() -> None:
    for name in djjobs.__all__:
        assert getattr(djjobs, name).__doc__, name


def test_submodules_are_still_reached_by_their_names() -> None:
    assert djjobs.worker.run_worker and djjobs.check.check
