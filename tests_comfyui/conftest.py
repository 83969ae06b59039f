"""Tests of the nodes, which need an environment with ComfyUI (`make test-comfyui`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from server import Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(sys.executable, tmp_path_factory.mktemp("comfyui"))
    yield running
    running.close()
