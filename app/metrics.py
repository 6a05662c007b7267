"""The service's own Prometheus metrics, in a registry of their own; vLLM keeps its beside them."""

from collections.abc import Callable

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
FILLS = tuple(step / 10 for step in range(1, 11))


class Metrics:
    """What ``/metrics`` shows under ``batchserve_``. Gauges are read at scrape time."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ours = self.registry
        self.queue_requests = Gauge(
            "batchserve_queue_requests", "Places taken in the queue, those being resolved included.", registry=ours
        )
        self.queue_tokens = Gauge("batchserve_queue_tokens", "Prompt tokens waiting in the queue.", registry=ours)
        self.queue_media_bytes = Gauge(
            "batchserve_queue_media_bytes", "Images and audio waiting in the queue, in bytes.", registry=ours
        )
        self.running_requests = Gauge("batchserve_running_requests", "Requests in the engine.", registry=ours)
        self.window_size = Histogram("batchserve_window_size", "Requests in a window.", buckets=SIZES, registry=ours)
        self.window_fill = Histogram(
            "batchserve_window_fill_ratio", "Requests in a window over batch_size.", buckets=FILLS, registry=ours
        )
        self.releases = Counter("batchserve_window_releases", "Windows released, by reason.", ["reason"], registry=ours)
        self.window_wait = Histogram(
            "batchserve_window_wait_seconds", "From admission to dispatch.", buckets=SECONDS, registry=ours
        )
        self.ttft = Histogram(
            "batchserve_ttft_seconds", "From receipt to the first token.", buckets=SECONDS, registry=ours
        )
        self.e2e = Histogram("batchserve_e2e_seconds", "From receipt to completion.", buckets=SECONDS, registry=ours)
        self.tokens = Counter("batchserve_tokens", "Tokens of answered requests, by kind.", ["kind"], registry=ours)
        self.errors = Counter(
            "batchserve_errors",
            "Errors given to callers, rows of a batch included, by code.",
            ["code"],
            registry=ours,
        )
        self.disconnected = Counter(
            "batchserve_client_disconnected",
            "Requests whose caller was gone before they were answered.",
            registry=ours,
        )
        self.ready = Gauge("batchserve_ready", "1 while the service takes work, else 0.", registry=ours)
        for kind in ("prompt", "completion", "cached"):
            self.tokens.labels(kind)
        for reason in ("full", "max_wait", "drain"):
            self.releases.labels(reason)

    def watch(
        self,
        *,
        queue_requests: Callable[[], float],
        queue_tokens: Callable[[], float],
        queue_media_bytes: Callable[[], float],
        running_requests: Callable[[], float],
        ready: Callable[[], float],
    ) -> None:
        """Where the gauges read from at each scrape."""
        self.queue_requests.set_function(queue_requests)
        self.queue_tokens.set_function(queue_tokens)
        self.queue_media_bytes.set_function(queue_media_bytes)
        self.running_requests.set_function(running_requests)
        self.ready.set_function(ready)

    def exposition(self) -> bytes:
        """The text that a scrape gets: ours, then the process's and vLLM's."""
        return generate_latest(self.registry) + generate_latest(REGISTRY)
