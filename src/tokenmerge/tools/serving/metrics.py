"""The server's Prometheus metrics. No label contains what a client wrote."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from .batching import Report

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_SIZES = (1, 2, 4, 8, 16, 32, 64)
_DECIBELS = (10, 15, 20, 25, 30, 35, 40, 45, 50, 60)
_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)


class Metrics:
    """Metrics of requests, of the queue and of batches."""

    def __init__(self) -> None:
        disable_created_metrics()
        self._registry = CollectorRegistry()
        own: dict[str, Any] = {"namespace": "tokenmerge", "registry": self._registry}
        self.requests = Counter(
            "requests", "Requests by route and status; 499: the client left.", ["route", "status"], **own
        )
        self.seconds = Histogram("request_seconds", "Seconds to answer with pictures.", buckets=_SECONDS, **own)
        self.pictures = Counter("pictures", "Pictures returned.", ["speed"], **own)
        self.queue = Gauge("queue", "Pictures that wait or are being drawn.", **own)
        self.redrawn = Counter("redrawn", "Pictures given to another replica because theirs died.", **own)
        self._batch_size = Histogram("batch_size", "Pictures in a batch.", buckets=_SIZES, **own)
        self._batch_seconds = Histogram("batch_seconds", "Seconds to draw a batch.", buckets=_SECONDS, **own)
        drift = "Estimated PSNR to the plain picture in dB; the worst of a batch."
        self._psnr = Histogram("estimated_psnr", drift, buckets=_DECIBELS, **own)
        self._steps = Counter("steps", "Denoising steps of batches by kind: full, merged, held.", ["kind"], **own)

    def add_batch(self, report: Report) -> None:
        """Record what a batch did."""
        self._batch_size.observe(report.size)
        self._batch_seconds.observe(report.seconds)
        if report.psnr is not None:
            self._psnr.observe(report.psnr)
        for kind, count in report.steps.items():
            self._steps.labels(kind).inc(count)

    def page(self) -> bytes:
        return generate_latest(self._registry)
