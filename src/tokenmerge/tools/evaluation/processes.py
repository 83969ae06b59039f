"""The processes that share an evaluation, however many there are: `accelerate launch` or `torchrun` starts them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch

from ...errors import TokenMergeError

Item = TypeVar("Item")

# Processes wait for each other for as long as the slowest needs.
_PATIENCE = timedelta(days=30)


class Processes:
    """Which of them this is, what its share is, and how it waits for the others."""

    def __init__(self) -> None:
        try:
            from accelerate import PartialState
        except ImportError as error:
            raise TokenMergeError("eval needs accelerate: pip install tokenmerge[eval]") from error
        # They only wait for each other, which the CPU can do: so more of them than there are GPUs may share one.
        self._state = PartialState(cpu=True, timeout=_PATIENCE)
        self.count: int = self._state.num_processes
        self.index: int = self._state.process_index
        # Among those on this machine.
        self.local_index: int = self._state.local_process_index

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def wait(self) -> None:
        """Until every process is here."""
        # accelerate's own would wait on the GPU whose number is this process's, which need not exist.
        if self.count > 1:
            torch.distributed.barrier()

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """The first process does what follows, then the others."""
        if not self.is_first:
            self.wait()
        yield
        if self.is_first:
            self.wait()

    def share_of(self, items: Sequence[Item]) -> list[Item]:
        """What this process has to do of them."""
        return list(items[self.index :: self.count])

    def end(self) -> None:
        self._state.destroy_process_group()
