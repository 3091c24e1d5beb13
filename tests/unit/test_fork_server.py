"""Commands that are forked are processes like any other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import fork_server
import psutil
import pytest
from helpers import wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each command gets an interpreter of its own")


def both(*words: str, **options: Any) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    """What becomes of a command that is forked, and of one in an interpreter of its own."""
    real = subprocess.run([sys.executable, *words], capture_output=True, text=True, **options)
    return fork_server.run(words, **options), real


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('it failed')", 1),
        ("raise SystemExit", 0),
        ("1 / 0", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os; os._exit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM),
    ],
)
def test_it_ends_as_an_interpreter_does(code: str, expected: int) -> None:
    forked, real = both("-c", code)
    assert forked.returncode == real.returncode == expected
    assert forked.stderr.splitlines()[-1:] == real.stderr.splitlines()[-1:]


def test_it_waits_for_its_threads_and_does_what_is_to_be_done_at_its_end() -> None:
    code = """
import atexit, threading, time
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
print("main")
"""
    forked, real = both("-c", code)
    assert forked.stdout == real.stdout == "main\nthread\nat exit\n"


def test_it_has_its_own_words_folder_environment_and_main_module(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text(
        "import os, sys, pickle\n"
        "class Thing: pass\n"
        "print(sys.argv[1:], os.getcwd(), os.environ['WHO'], __name__, sys.modules['__main__'].Thing is Thing)\n"
        "print(type(pickle.loads(pickle.dumps(Thing()))) is Thing, sys.path[0])\n"
    )
    environment = {**os.environ, "WHO": "me"}
    forked, real = both("-m", "beside", "a b", cwd=tmp_path, env=environment)
    assert forked.stdout == real.stdout, forked.stderr
    assert f"['a b'] {tmp_path} me __main__ True" in forked.stdout


def test_settings_come_from_its_own_environment() -> None:
    code = "import djjobs; print(djjobs.settings.lease)"
    told = [
        fork_server.run(["-c", code], env={**os.environ, "DJJOBS_LEASE": lease}).stdout for lease in ("70", "71", "70")
    ]
    assert told == ["70.0\n", "71.0\n", "70.0\n"]


def test_what_one_command_changes_no_other_sees() -> None:
    assert fork_server.run(["-c", "import djjobs; djjobs.settings.lease = 99; print(djjobs.settings.lease)"]).stdout
    assert "99" not in fork_server.run(["-c", "import djjobs; print(djjobs.settings.lease)"]).stdout


def test_a_session_of_its_own_and_signals() -> None:
    code = "import signal, sys; signal.signal(15, lambda *_: sys.exit(5)); print('ready', flush=True); signal.pause()"
    with fork_server.start(["-c", code], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        assert os.getsid(process.pid) == process.pid
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 5
    assert not psutil.pid_exists(process.pid)


def test_what_a_command_has_opened_is_closed_for_the_others() -> None:
    """A pipe whose end another command holds open would never end."""
    long = fork_server.start(["-c", "import time; time.sleep(60)"])
    try:
        with fork_server.start(["-c", "print('over')"], stdout=subprocess.PIPE) as short:
            assert short.communicate()[0] == "over\n"
        files = [os.readlink(f"/proc/{long.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{long.pid}/fd")]
        assert not [file for file in files[3:] if "socket" in file or "pipe" in file]
    finally:
        long.kill()
    assert long.wait() == -signal.SIGKILL


def test_the_servers_end_with_the_process_that_started_them() -> None:
    code = """
import sys; sys.path.insert(0, sys.argv[1])
import fork_server
fork_server.run(["-c", "pass"])
import psutil
print(*[child.pid for child in psutil.Process().children(recursive=True)])
"""
    tests = str(Path(fork_server.__file__).parent)
    told = subprocess.run([sys.executable, "-c", code, tests], capture_output=True, text=True, check=True).stdout
    pids = [int(pid) for pid in told.split()]
    assert len(pids) == 2
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids))
