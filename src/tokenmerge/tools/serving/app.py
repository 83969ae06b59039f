"""The front: it reads HTTP requests, passes their pictures to workers, and answers."""

from __future__ import annotations

import asyncio
import base64
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ReplicaState
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...errors import TokenMergeError
from ..addresses import is_private
from .batching import Drawn, Failed
from .keys import is_known
from .metrics import CONTENT_TYPE, Metrics
from .offer import Offer, Serving
from .processes import bind_replica, proxy_address
from .proxy import HEALTH, away, refused
from .requests import Job, Order, Refusal, read_order

APPLICATION = "tokenmerge"
WORKER = "Worker"
# If a replica dies, another draws its picture. A picture that kills this many is given up.
_ATTEMPTS = 3
# Seconds for which /healthz repeats its answer, since anybody may ask.
_FRESH = 1.0
# Status in the metrics of a client that left before its answer.
_LEFT = 499
_MOST_SECONDS_TO_WAIT = 60


class Places:
    """Limits how many pictures may wait or be drawn."""

    def __init__(self, most: int, metrics: Metrics) -> None:
        self._most = most
        self._metrics = metrics
        self.taken = 0
        self.pace = 1.0  # seconds per picture, of the last batch
        self._empty = asyncio.Event()
        self._empty.set()

    @contextmanager
    def take(self, count: int) -> Iterator[None]:
        """Take places for all pictures of a request, or refuse it. They are freed however the request ends."""
        if self.taken + count > self._most:
            wait = math.ceil(self.pace * (self.taken + count - self._most))
            raise Refusal(
                429,
                f"the queue is full: {self.taken} of {self._most} places are taken, and {count} are needed; "
                "send the request again later",
                retry_after=max(1, min(wait, _MOST_SECONDS_TO_WAIT)),
            )
        self._change(count)
        try:
            yield
        finally:
            self._change(-count)

    async def emptied(self) -> None:
        """Wait until all places are free."""
        await self._empty.wait()

    def _change(self, count: int) -> None:
        self.taken += count
        self._metrics.queue.set(self.taken)
        if self.taken:
            self._empty.clear()
        else:
            self._empty.set()


class Front:
    """Answers HTTP requests. There is one replica of it. digests: of the API keys; empty if none is needed."""

    def __init__(self, workers: DeploymentHandle, serving: Serving, offer: Offer, digests: tuple[bytes, ...]) -> None:
        if serving.local:
            bind_replica()
        elif not digests:
            # Whoever deploys to a cluster may not know where it listens.
            host, port = proxy_address()
            if not is_private(host):
                raise TokenMergeError(
                    f"the cluster serves at {host} port {port}, where anybody may draw without a key; give keys, or "
                    "start Serve at 127.0.0.1"
                )
        # Ray's config files may rename the application.
        self._application = serve.get_replica_context().app_name
        self._workers = workers
        self._offer = offer
        self._digests = digests
        self._timeout = serving.timeout
        self._metrics = Metrics()
        self._places = Places(serving.max_queue, self._metrics)
        self._created = int(time.time())
        self._health: tuple[float, Response] | None = None
        self._ending = False
        self._routes: dict[str, tuple[str, Callable[[Request], Awaitable[Response]]]] = {
            "/v1/images/generations": ("POST", self._generate),
            "/v1/models": ("GET", self._models),
            HEALTH: ("GET", self._healthz),
            "/metrics": ("GET", self._page),
        }

    async def __call__(self, request: Request) -> Response:
        path = request.url.path
        status = _LEFT
        try:
            response = await self._answer(path, request)
            status = response.status_code
        except Refusal as refusal:
            response = refused(refusal)
            status = refusal.status
        finally:
            # Never the client's own path: there would be no end of labels.
            self._metrics.requests.labels(path if path in self._routes else "other", str(status)).inc()
        return response

    async def drain(self) -> None:
        """Refuse new requests, and wait for pictures that are being drawn."""
        self._ending = True
        await self._places.emptied()

    async def _answer(self, path: str, request: Request) -> Response:
        if path not in self._routes:
            raise Refusal(404, f"there is nothing at this address; use one of {', '.join(self._routes)}")
        method, answer = self._routes[path]
        if request.method != method:
            raise Refusal(405, f"{path} takes {method} only; send that")
        if self._digests and path != HEALTH and not is_known(request.headers.get("authorization"), self._digests):
            raise Refusal(401, "the API key is missing or unknown; send it as 'Authorization: Bearer KEY'")
        return await answer(request)

    async def _generate(self, request: Request) -> Response:
        begun = time.perf_counter()
        order = read_order(await request.body(), self._offer)
        if self._ending:
            raise away()
        with self._places.take(order.n):
            pictures = await self._drawn(order.jobs())
        self._metrics.seconds.observe(time.perf_counter() - begun)
        self._metrics.pictures.labels(order.settings.speed).inc(order.n)
        return JSONResponse(_answered(order, pictures))

    async def _drawn(self, jobs: Sequence[Job]) -> list[bytes]:
        """All pictures, or a refusal. No task is left in the background."""
        tasks = [asyncio.create_task(self._draw(job)) for job in jobs]
        try:
            return await asyncio.wait_for(asyncio.gather(*tasks), self._timeout)
        except asyncio.TimeoutError:
            raise Refusal(
                503, f"there was no picture within {self._timeout:g} seconds; send the request again", retry_after=1
            ) from None
        finally:
            for task in tasks:
                task.cancel()

    async def _draw(self, job: Job) -> bytes:
        for _ in range(_ATTEMPTS):
            call = self._workers.draw.remote(job)
            try:
                drawn: Drawn | Failed = await call
            except asyncio.CancelledError:
                call.cancel()
                raise
            except RayActorError:
                # The same seed gives the same picture, so it can be drawn again.
                self._metrics.redrawn.inc()
                continue
            except (RayError, RayServeException) as error:
                message = f"no replica could draw ({type(error).__name__}); send the request again"
                raise Refusal(503, message, retry_after=1) from None
            if isinstance(drawn, Failed):
                raise Refusal(drawn.status, drawn.message, retry_after=1 if drawn.status == 503 else None)
            if drawn.report is not None:
                self._metrics.add_batch(drawn.report)
                self._places.pace = drawn.report.seconds / drawn.report.size
            return drawn.png
        raise Refusal(503, f"{_ATTEMPTS} replicas died over this picture; send the request again", retry_after=1)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._offer.to_dict(self._created)]})

    async def _healthz(self, request: Request) -> Response:
        """Whether a replica is ready to draw."""
        if self._ending:
            return JSONResponse({"status": "ending", "replicas": 0, "starting": 0}, 503)
        now = time.monotonic()
        if self._health is None or now - self._health[0] > _FRESH:
            try:
                running, starting = await asyncio.to_thread(_replicas, self._application)
            except (RayError, RayServeException):
                # Ray's controller, which counts replicas, is being replaced.
                running, starting = 0, 0
            status = {"status": "ok" if running else "no replica", "replicas": running, "starting": starting}
            self._health = now, JSONResponse(status, 200 if running else 503)
        return self._health[1]

    async def _page(self, request: Request) -> Response:
        return Response(self._metrics.page(), media_type=CONTENT_TYPE)


def _replicas(application: str) -> tuple[int, int]:
    """The number of workers that run, and of those that are starting or stopping."""
    found = serve.status().applications.get(application)
    # Ray drops the application before its replicas.
    states: dict[str, int] = found.deployments[WORKER].replica_states if found is not None else {}
    running = states.get(ReplicaState.RUNNING, 0)
    return running, sum(states.values()) - running


def _answered(order: Order, pictures: Sequence[bytes]) -> dict[str, Any]:
    """Pictures in OpenAI's form, with the seed of each."""
    data = [
        {"b64_json": base64.b64encode(png).decode("ascii"), "seed": job.seed}
        for job, png in zip(order.jobs(), pictures, strict=True)
    ]
    return {"created": int(time.time()), "data": data}
