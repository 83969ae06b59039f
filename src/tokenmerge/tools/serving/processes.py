"""Ray on this machine: its listeners on loopback and a check that they are, and its processes, which end with us."""

from __future__ import annotations

import os
import secrets
import time
from typing import Any

import psutil

from ...errors import TokenMergeError
from ..addresses import addresses_of, is_loopback
from .proxy import CALLBACK

# Ray's processes that nothing works without; Ray starts no others in their place.
_VITAL = ("gcs_server", "raylet")
# Seconds that processes have to end by themselves.
_GRACE = 5


def prepare_ray() -> None:
    """Set what Ray reads when it is imported: a node of its own on 127.0.0.1, which takes work from us alone."""
    # By name for other systems. It is what makes 127.0.0.1 the address of the node, and all servers bind to that.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    # Whoever reaches Ray's ports may run code. Others on this machine can reach them, and do not have this.
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    # Ray lets all other programs of the machine go first, and whoever is served waits.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    # Of two processes that died, Ray would tell the second time when all ends, as if the end had killed it.
    os.environ["RAY_DEDUP_LOGS"] = "0"
    # No argument of Ray's takes this.
    os.environ["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] = CALLBACK


def bind_replica() -> None:
    """Bind the server that this replica gets for calls of other replicas to loopback. Call it in the constructor.

    Ray Serve binds it to all addresses, and no setting says otherwise.
    """
    from ray.serve._private import replica

    whole = replica.add_port_to_grpc_server

    def add_port(server: Any, address: str) -> int:
        port: int = whole(server, address.replace("[::]", "127.0.0.1"))
        return port

    replica.add_port_to_grpc_server = add_port


def check_listeners(host: str, port: int) -> None:
    """Refuse to go on where this process, or one that it started, listens beyond loopback, but for what was asked."""
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
    """Where Ray's HTTP proxies listen, as whoever started Serve has asked for."""
    from ray.serve.context import _get_global_client

    running = _get_global_client().http_config
    return running.host, running.port


def wait_while_alive() -> None:
    """Wait for as long as Ray works, if it is ours; in a cluster for ever."""
    vital = [each for each in psutil.Process().children() if each.name() in _VITAL]
    while True:
        for each in vital:
            if not each.is_running() or each.status() == psutil.STATUS_ZOMBIE:
                raise TokenMergeError("Ray has ended, and the server with it; start it again with --logs FOLDER")
        time.sleep(1)


def end_ray() -> None:
    """Leave Ray. Processes that this one has started, and theirs, are gone afterwards."""
    import ray

    # Those whose parent goes first are nobody's children.
    family = psutil.Process().children(recursive=True)
    ray.shutdown()
    for each in psutil.wait_procs(family, _GRACE)[1]:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
