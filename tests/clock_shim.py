"""A clock that a test can turn, for a private server: a small library that is loaded before the server's own.

It moves the time of day that the server sees, as when somebody sets the clock of its machine. Nothing else on this
machine sees it. It takes a C compiler, and no special rights.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("clock_shim.c")


class NoCompiler(Exception):
    """This machine has no C compiler. The message says how to get one."""


class Clock:
    """The clock of one server.

    Parameters
    ----------
    folder : Path
        The server's own, which its account can read.
    """

    def __init__(self, folder: Path) -> None:
        self._library, self._file = folder / "clock_shim.so", folder / "clock"
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise NoCompiler("a server whose clock can be turned needs a C compiler: apt-get install gcc libc6-dev")
        command = [compiler, "-O1", "-shared", "-fPIC", "-w", "-o", self._library, SOURCE, "-ldl", "-lpthread"]
        subprocess.run(command, check=True)
        self._library.chmod(0o755)
        self._file.write_bytes(struct.pack("q", 0))
        self._file.chmod(0o644)

    @property
    def command(self) -> list[str]:
        """What comes before the command that starts the server."""
        return ["/usr/bin/env", f"LD_PRELOAD={self._library}", f"DJJOBS_CLOCK={self._file}"]

    @property
    def offset(self) -> int:
        """By how many seconds the clock is wrong."""
        return int(struct.unpack("q", self._file.read_bytes())[0])

    def jump(self, seconds: int) -> None:
        """Set the clock so many seconds on, or back."""
        with open(self._file, "r+b") as file:
            file.write(struct.pack("q", self.offset + seconds))
