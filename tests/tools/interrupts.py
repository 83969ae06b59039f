"""Interrupts a command as a person does, with Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any


def interrupt(command: list[str], ready: Callable[[], bool]) -> str:
    """Start `command`, interrupt it as soon as it is `ready`, and return what it printed, which must be no traceback
    and end with one line that says what happened."""
    with _started(command) as process:
        while not ready() and process.poll() is None:
            time.sleep(0.05)
        return _interrupted(process, "")


def interrupt_when(command: list[str], words: str) -> str:
    """The same as soon as it has printed some words."""
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
        # A shell's background jobs, and what they start, are deaf to interrupts.
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
