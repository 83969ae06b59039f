"""One or more processes that share an evaluation; `accelerate launch` or `torchrun` starts them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch

from ...errors import TokenMergeError

Item = TypeVar("Item")

# However long the slowest process takes, the others wait.
_PATIENCE = timedelta(days=30)


class Processes:
    """This process among all: its index, its share of the work, and ways to wait for the others."""

    def __init__(self) -> None:
        try:
            from accelerate import PartialState
        except ImportError as error:
            raise TokenMergeError("eval needs accelerate: pip install tokenmerge[eval]") from error
        # Processes only wait for each other, which the CPU can do. So several may share a GPU.
        self._state = PartialState(cpu=True, timeout=_PATIENCE)
        self.count: int = self._state.num_processes
        self.index: int = self._state.process_index
        # The index among the processes on this machine.
        self.local_index: int = self._state.local_process_index

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def wait(self) -> None:
        """Wait until every process is here."""
        # accelerate would wait on the GPU with the number of this process, which may not exist.
        if self.count > 1:
            torch.distributed.barrier()

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """The first process runs the body first, then all others do."""
        if not self.is_first:
            self.wait()
        yield
        if self.is_first:
            self.wait()

    def share_of(self, items: Sequence[Item]) -> list[Item]:
        """The items that this process handles."""
        return list(items[self.index :: self.count])

    def end(self) -> None:
        self._state.destroy_process_group()
