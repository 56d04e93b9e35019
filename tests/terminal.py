"""A terminal of 80 columns for programs that behave otherwise there than in a file."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parent.parent


class Shown(NamedTuple):
    """What a program showed: the raw text, the rows as a person sees them, and its exit code."""

    text: str
    rows: list[str]
    code: int


def on_terminal(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    columns: int = 80,
    stdout: int | None = None,
) -> Shown:
    """Runs a command with stdout and stderr on a terminal; ``stdout`` sends the first elsewhere."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    hidden = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"}
    surroundings = {k: v for k, v in os.environ.items() if k not in hidden}
    process = subprocess.Popen(
        command,
        cwd=REPO,
        env=surroundings | {"PYTHONPATH": ".", "OMP_NUM_THREADS": "1"} | dict(env or {}),
        stdin=theirs,
        stdout=theirs if stdout is None else stdout,
        stderr=theirs,
    )
    os.close(theirs)
    pieces = []
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        pieces.append(piece)
    os.close(ours)
    text = b"".join(pieces).decode()
    return Shown(text, rows_of(text, columns), process.wait())


def rows_of(text: str, columns: int) -> list[str]:
    """The rows that a terminal of so many columns ends up with, without blanks at their ends."""
    rows, y, x = [[]], 0, 0
    moves = re.findall(r"\x1b\[(\d*)([A-Za-z])|\x1b\[[\d;?]*[a-zA-Z]|([\s\S])", text)
    for number, letter, character in moves:
        if letter == "A":
            y = max(0, y - int(number or 1))
        elif character == "\r":
            x = 0
        elif character == "\n":
            y += 1
        elif character:
            if x == columns:  # a full row goes on in the next one
                x, y = 0, y + 1
            rows += [[] for _ in range(y + 1 - len(rows))]
            row = rows[y]
            row += " " * (x + 1 - len(row))
            row[x] = character
            x += 1
        rows += [[] for _ in range(y + 1 - len(rows))]
    return ["".join(row).rstrip() for row in rows]
