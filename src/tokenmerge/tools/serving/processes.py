"""Ray on this machine: keeps its listeners on loopback, checks that they are, and ends its processes with ours."""

from __future__ import annotations

import os
import secrets
import time
from typing import Any

import psutil

from ...errors import TokenMergeError
from ..addresses import addresses_of, is_loopback
from .proxy import CALLBACK

# Processes that Ray cannot work without and does not restart.
_VITAL = ("gcs_server", "raylet")
# Seconds that processes have to end before they are killed.
_GRACE = 5


def prepare_ray() -> None:
    """Set what Ray reads at import: its own node on 127.0.0.1, which takes work from us alone."""
    # Meant for other systems, but it makes 127.0.0.1 the node's address, to which all of Ray's servers bind.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    # Whoever reaches Ray's ports can run code. Other users of this machine reach them, but do not have this token.
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    # By default, Ray's workers yield to all other programs, and clients wait.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    # When two processes die alike, Ray would report the second only at the end, as if the end had killed it.
    os.environ["RAY_DEDUP_LOGS"] = "0"
    # Ray has no argument for this.
    os.environ["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] = CALLBACK


def bind_replica() -> None:
    """Bind the server through which other replicas call this one to loopback. Call it in the constructor.

    Ray Serve binds that server to all addresses, and no setting changes this.
    """
    from ray.serve._private import replica

    original = replica.add_port_to_grpc_server

    def add_port(server: Any, address: str) -> int:
        port: int = original(server, address.replace("[::]", "127.0.0.1"))
        return port

    replica.add_port_to_grpc_server = add_port


def check_listeners(host: str, port: int) -> None:
    """Raise if this process, or one that it started, listens beyond loopback anywhere but at `host` and `port`."""
    here, asked = psutil.Process(), {(address, port) for address in addresses_of(host)}
    for process in (here, *here.children(recursive=True)):
        try:
            name, connections = process.name(), process.net_connections("inet")
        except psutil.NoSuchProcess:
            continue
        for each in connections:
            if each.status == psutil.CONN_LISTEN and not (is_loopback(each.laddr.ip) or tuple(each.laddr) in asked):
                raise TokenMergeError(
                    f"{name} listens on {each.laddr.ip} port {each.laddr.port}, not on loopback alone; "
                    "use ray 2.60, or --cluster for a cluster whose network you trust"
                )


def proxy_address() -> tuple[str, int]:
    """Where Ray's HTTP proxies listen: the address at which Serve was started."""
    from ray.serve.context import _get_global_client

    running = _get_global_client().http_config
    return running.host, running.port


def wait_while_alive() -> None:
    """Wait until our own Ray breaks down, which raises. On a cluster, wait for ever."""
    vital = [each for each in psutil.Process().children() if each.name() in _VITAL]
    while True:
        for each in vital:
            if not each.is_running() or each.status() == psutil.STATUS_ZOMBIE:
                raise TokenMergeError("Ray has ended, and the server with it; start again with --logs FOLDER")
        time.sleep(1)


def end_ray() -> None:
    """Shut Ray down. No process that this one started, directly or not, is left."""
    import ray

    # Listed before the shutdown: a process whose parent ends first is no longer our descendant.
    family = psutil.Process().children(recursive=True)
    ray.shutdown()
    for each in psutil.wait_procs(family, _GRACE)[1]:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
