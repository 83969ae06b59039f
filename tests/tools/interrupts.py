"""Interrupt a command as Ctrl-C does."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any


def interrupt(command: list[str], ready: Callable[[], bool]) -> str:
    """Start `command`, interrupt it once it is `ready`, and return its output. The output must have no traceback and
    must end with a line that reports the interrupt."""
    with _started(command) as process:
        while not ready() and process.poll() is None:
            time.sleep(0.05)
        return _interrupted(process, "")


def interrupt_when(command: list[str], words: str) -> str:
    """Like `interrupt`, once the command has printed `words`."""
    with _started(command) as process:
        printed = ""
        while words not in printed and (character := process.stderr.read(1)):
            printed += character
        return _interrupted(process, printed)


def _started(command: list[str]) -> Any:
    return subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        # Background jobs of a shell, and their children, ignore interrupts by default.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def _interrupted(process: Any, printed: str) -> str:
    process.send_signal(signal.SIGINT)
    printed += process.stderr.read()
    process.wait()
    assert process.returncode == 130
    assert printed.endswith("tokenmerge: interrupted\n")
    assert "Traceback" not in printed
    return printed
