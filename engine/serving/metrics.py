"""What Prometheus is told: requests, tokens, times, and how full the arena is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .jobs import Job, ReplyJob

if TYPE_CHECKING:
    from .service import Service

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
GAPS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 2, 5)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counted since the server began. It watches the scheduler, and is asked for a text by whoever scrapes it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"cake_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"cake_{name}", text, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"cake_{name}", text, buckets=buckets, registry=self.registry)

        self.requests = counter("requests_total", "HTTP requests by route and status", "route", "status")
        self.replies = counter("replies_total", "Replies and documents by how they ended", "finish_reason")
        self.prompt_tokens = counter("prompt_tokens_total", "Tokens that were read")
        self.reply_tokens = counter("reply_tokens_total", "Tokens that were written")
        self.queue_seconds = histogram("queue_seconds", "From the request to its place in the batch", SECONDS)
        self.first_token_seconds = histogram("first_token_seconds", "From the request to its first token", SECONDS)
        self.token_seconds = histogram("token_seconds", "From a token of a reply to the next one", GAPS)
        self.reply_seconds = histogram("reply_seconds", "From the request to the end of its reply", SECONDS)
        self.running = gauge("running", "Replies and documents in the batch")
        self.waiting = gauge("waiting", "Replies and documents that wait for a place")
        self.arena_bytes = gauge("arena_used_bytes", "Bytes of the KV arena that are taken, headroom included")
        self.arena_limit = gauge("arena_limit_bytes", "Bytes of the KV arena")
        self.documents = gauge("documents", "Documents that can be asked about")
        self.document_bytes = gauge("document_bytes", "Bytes of their keys and values")

    # -- the scheduler's watcher --------------------------------------------------------------------------------------

    def waited(self, job: Job, seconds: float) -> None:
        self.queue_seconds.observe(seconds)

    def token(self, job: Job, seconds: float, *, first: bool) -> None:
        if first:
            self.prompt_tokens.inc(len(job.ids))
        if isinstance(job, ReplyJob):
            (self.first_token_seconds if first else self.token_seconds).observe(seconds)
            self.reply_tokens.inc()

    def over(self, job: Job, why: str) -> None:
        self.replies.labels(why).inc()
        if job.last_token is not None and isinstance(job, ReplyJob):
            self.reply_seconds.observe(job.last_token - job.asked)

    # -- whoever scrapes ----------------------------------------------------------------------------------------------

    def text(self, service: Service) -> bytes:
        """Prometheus' text format."""
        scheduler, shelf = service.scheduler, service.shelf
        self.running.set(scheduler.running)
        self.waiting.set(scheduler.waiting)
        self.arena_bytes.set(scheduler.arena_bytes)
        self.arena_limit.set(scheduler.limit)
        self.documents.set(len(shelf))
        self.document_bytes.set(shelf.nbytes)
        return generate_latest(self.registry)
