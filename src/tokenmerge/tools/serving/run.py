"""Starts Ray, deploys the front and its workers, and ends all of them."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from ...errors import TokenMergeError, did_you_mean, first_line
from ..addresses import check_port, is_private
from ..loading import best_device, name_of, outline, whole_path
from ..speeds import BATCHED_SPEEDS
from .keys import read_keys
from .offer import Offer, Serving
from .processes import check_listeners, end_ray, prepare_ray, proxy_address, wait_while_alive
from .sharing import may_share

# Batches' worth of calls that a worker may hold, to choose its next batch from.
_AHEAD = 4
# Attempts to start Ray: a busy machine may be too slow at first, and faster once its files have been read.
_STARTS = 3
# Seconds that pictures get beyond a timeout.
_GRACE = 10
# Bytes for pictures in transit; Ray's default is a third of the memory.
_STORE = 256 * 2**20


def run_server(serving: Serving) -> None:
    """Serve until interrupted."""
    digests = read_keys(serving.keys)
    _check_host(serving.host, bool(digests))
    if serving.local:
        _check_replicas(serving)
    offer = _offer(serving)
    if serving.local:
        check_port(serving.host, serving.port)
    with _ray(serving), _interrupted_by_sigterm():
        _serve(serving, offer, digests)


def _offer(serving: Serving) -> Offer:
    """What is served of a model."""
    model = outline(serving.model)
    model.drawing_class()
    width, height = model.own_size
    limits = serving.limits
    if max(width, height) > limits.side:
        raise TokenMergeError(
            f"{serving.model} draws {width}x{height} by default, but --max-side is {limits.side}; raise it"
        )
    return Offer(
        model=name_of(serving.model),
        size=(width, height),
        steps=min(model.defaults.steps, limits.steps),
        speed=serving.speed,
        batched={name: may_share(techniques, model.denoiser) for name, techniques in BATCHED_SPEEDS.items()},
        unit=model.unit,
        least=model.least_side,
        limits=limits,
    )


def application(arguments: Mapping[str, Any]) -> Any:
    """The application for Ray's own commands and config files. arguments: fields of `Serving`; `model` is required.

    Ray decides where it listens and how it scales.
    """
    known = [item.name for item in fields(Serving)]
    for name in arguments:
        if name not in known:
            raise TokenMergeError(f"args has {name!r}{did_you_mean(name, known)}; use any of {', '.join(known)}")
    path = arguments.get("keys")
    serving = Serving(**{"cluster": "auto", **arguments, "keys": Path(path) if path else None})
    digests = read_keys(serving.keys)
    return _bound(serving, _offer(serving), digests)


def _bound(serving: Serving, offer: Offer, digests: tuple[bytes, ...]) -> Any:
    from ray import serve

    from .app import WORKER, Front
    from .worker import Worker

    # Replicas run in other working directories.
    serving = replace(serving, model=whole_path(serving.model))
    gpus = 1 if (serving.device or ("cuda" if torch.cuda.is_available() else "cpu")).startswith("cuda") else 0
    # Our own replicas end when all is drawn (`_end`). A cluster may end replicas at any time to scale down.
    ends: dict[str, Any] = {
        "health_check_period_s": 2,
        "graceful_shutdown_wait_loop_s": 0.2,
        "graceful_shutdown_timeout_s": _GRACE if serving.local else serving.timeout,
    }
    worker = serve.deployment(
        name=WORKER,
        num_replicas=serving.replicas,
        ray_actor_options={"num_cpus": serving.threads, "num_gpus": gpus},
        max_ongoing_requests=_AHEAD * serving.max_batch,
        **ends,
    )(Worker)
    # Its work is light, and a single front knows how many places are taken. If it cannot start, a retry would not help.
    front = serve.deployment(
        name="Front",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=100_000,
        max_constructor_retry_count=1,
        **ends,
    )(Front)
    return front.bind(worker.bind(serving, offer.batched), serving, offer, digests)


def _serve(serving: Serving, offer: Offer, digests: tuple[bytes, ...]) -> None:
    """Deploy the application on Ray, and wait."""
    from ray import serve

    from .app import APPLICATION

    # Ray's access log would record every address that clients ask for.
    quiet = {"enable_access_log": False}
    where: dict[str, Any] = {"host": serving.host, "port": serving.port}
    if serving.local:
        # Longer than the front's own timeout, so that the front answers.
        where["request_timeout_s"] = serving.timeout + _GRACE
    serve.start(proxy_location="HeadOnly", http_options=where, logging_config=quiet)
    _check_proxy(serving)
    front = None
    try:
        front = serve.run(_bound(serving, offer, digests), name=APPLICATION, route_prefix="/", logging_config=quiet)
        if serving.local:
            check_listeners(serving.host, serving.port)
        print(f"serving {offer.model} at http://{serving.host}:{serving.port}/v1; Ctrl-C to stop", flush=True)
        wait_while_alive()
    except KeyboardInterrupt:
        _end(front, serving.timeout)
        raise
    except RuntimeError as error:
        serve.delete(APPLICATION)
        raise TokenMergeError(
            f"the replicas did not start ({first_line(error)}); start again with --logs FOLDER, and look there"
        ) from error


def _end(front: Any, timeout: float) -> None:
    """Finish accepted requests, then end. A second interrupt skips the wait."""
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    from .app import APPLICATION

    try:
        if front is not None:
            print("finishing accepted requests; press Ctrl-C again to stop without waiting", flush=True)
            front.drain.remote().result(timeout_s=timeout + _GRACE)
    except (RayError, RayServeException, TimeoutError):
        # The front is gone already.
        pass
    finally:
        # Delete our application only: a cluster may have others. If deletion takes long, Ray completes it alone.
        with suppress(TimeoutError):
            serve.delete(APPLICATION)


@contextmanager
def _ray(serving: Serving) -> Iterator[None]:
    """A Ray of our own that ends with us, or a connection to a cluster."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if serving.local:
        # This must precede the import of Ray.
        prepare_ray()
    # A missing package is reported before anything starts.
    from . import app, worker  # noqa: F401

    # Ray Serve logs a banner at every start.
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    folder = serving.logs or Path(tempfile.mkdtemp(prefix="tokenmerge-"))
    try:
        _enter_ray(serving, folder)
        yield
    finally:
        end_ray()
        if serving.logs is None:
            shutil.rmtree(folder, ignore_errors=True)


def _enter_ray(serving: Serving, folder: Path) -> None:
    import ray

    starts = _STARTS if serving.local else 1
    for number in range(starts):
        try:
            ray.init(log_to_driver=False, logging_level="ERROR", **_node(serving, folder))
            return
        except Exception as error:
            # Ray raises nothing narrower when its processes take more than 30 seconds to start.
            end_ray()
            if number == starts - 1:
                raise TokenMergeError(
                    f"Ray did not start ({first_line(error)}); try again when the machine is less busy, "
                    "or check --cluster"
                ) from error


def _node(serving: Serving, folder: Path) -> dict[str, Any]:
    if not serving.local:
        return {"address": serving.cluster}
    return {
        "num_cpus": max(os.cpu_count() or 1, serving.replicas * serving.threads),
        "include_dashboard": False,
        "object_store_memory": _STORE,
        "_temp_dir": str(folder.resolve()),
    }


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Treat SIGTERM, which service managers send, like Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_host(host: str, has_keys: bool) -> None:
    try:
        private = is_private(host)
    except OSError as error:
        raise TokenMergeError(f"--host {host!r} is not an address of this machine; use 127.0.0.1 or 0.0.0.0") from error
    if not has_keys and not private:
        raise TokenMergeError(f"--host {host} lets everybody draw; give --keys FILE, or leave --host at 127.0.0.1")


def _check_proxy(serving: Serving) -> None:
    """Refuse another address than the cluster's: Serve keeps the one that it was started with."""
    host, port = proxy_address()
    if (host, port) != (serving.host, serving.port):
        raise TokenMergeError(
            f"the cluster already serves at {host} port {port}, not at {serving.host} port {serving.port}; "
            f"use --host {host} --port {port}, or end what runs there with `serve shutdown`"
        )


def _check_replicas(serving: Serving) -> None:
    device = best_device(serving.device)
    gpus = torch.cuda.device_count() if device.type == "cuda" else serving.replicas
    if serving.replicas > gpus:
        raise TokenMergeError(
            f"--replicas is {serving.replicas}, but each needs a GPU and there {'is' if gpus == 1 else 'are'} {gpus}; "
            f"use {gpus}"
        )
