"""A terminal that a program runs in, and the text that a person would see on it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
_CONTROL = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])")


class Screen:
    """Interprets the output of the panel and of programs: text, line ends, cursor up, erasing. ``lines`` are all
    lines, including those that have scrolled away.
    """

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.lines, self.row, self.column = [""], 0, 0
        self.modes: list[str] = []

    def feed(self, text: str) -> None:
        place = 0
        while place < len(text):
            if found := _CONTROL.match(text, place):
                self._control(*found.groups())
                place = found.end()
                continue
            self._put(text[place])
            place += 1

    def _put(self, character: str) -> None:
        if character == "\n":
            self.row, self.column = self.row + 1, 0
        elif character == "\r":
            self.column = 0
        else:
            if self.column >= self.width:
                self.row, self.column = self.row + 1, 0
            self._reach()
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
            self.column += 1
        self._reach()

    def _control(self, argument: str, kind: str) -> None:
        if kind == "A":
            top = max(
                0, len(self.lines) - self.height
            )  # lines that have scrolled away cannot be reached
            self.row = max(top, self.row - int(argument or 1))
        elif kind == "K":
            self.lines[self.row] = ""
        elif kind in "hl":
            self.modes.append(argument + kind)

    def _reach(self) -> None:
        self.lines += [""] * (self.row + 1 - len(self.lines))

    @property
    def shown(self) -> list[str]:
        return [line.rstrip() for line in self.lines if line.strip()]


class InTerminal:
    """A Python program on a pseudo-terminal of its own."""

    def __init__(self, code: str, *arguments: str, width: int = 80, height: int = 24) -> None:
        self.screen, self._raw = Screen(width, height), b""
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            signal.signal(
                signal.SIGINT, signal.SIG_DFL
            )  # ignored if the tests run in the background of a shell
            os.environ.update(PYTHONPATH=str(ROOT), TERM="xterm", COLUMNS="", LINES="")
            os.execv(sys.executable, [sys.executable, "-c", code, *arguments])
        self.resize(width, height)

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self.screen.width, self.screen.height = width, height

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def until(self, seen: Callable[[Screen], bool], limit_s: float = 30.0) -> Screen:
        """Read until a text is seen; raises TimeoutError."""
        end = time.monotonic() + limit_s
        while not seen(self.screen):
            if time.monotonic() > end or not self._read(end - time.monotonic()):
                raise TimeoutError("\n".join(self.screen.lines))
        return self.screen

    def ended(self, limit_s: float = 30.0) -> int:
        """Read to the end; the exit status (128 + n for signal n)."""
        end = time.monotonic() + limit_s
        while self._read(max(0.0, end - time.monotonic())):
            pass
        os.close(self._fd)
        return self.reap()

    def hang_up(self) -> None:
        """Close the terminal, as when a connection breaks."""
        os.close(self._fd)

    def reap(self) -> int:
        """Wait for the program's end; as ``ended``."""
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    def _read(self, limit_s: float) -> bool:
        if not select.select([self._fd], [], [], limit_s)[0]:
            raise TimeoutError("\n".join(self.screen.lines))
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError:  # on Linux: the other end is closed
            return False
        self._raw += data
        text = self._raw.decode(errors="ignore")
        whole = text.rfind("\x1b")  # a sequence may be incomplete
        cut = (
            whole
            if whole >= 0 and not _CONTROL.match(text, whole) and len(text) - whole < 12
            else len(text)
        )
        self.screen.feed(text[:cut])
        self._raw = text[cut:].encode()
        return bool(data)
