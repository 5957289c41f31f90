"""Sink for Prometheus: serves the state of a job at http://127.0.0.1:PORT/metrics."""

import importlib
from typing import Any

from ntp_plugin.telemetry.events import CopyTrouble, Corrupted, Hung, KeyRestored, RankLost, SaveFailed
from ntp_plugin.telemetry.job_state import JobState, SlotState
from ntp_plugin.telemetry.record import RecordedEvent


class PrometheusSink:
    """Serves one page of metrics, on loopback by default."""

    def __init__(self, port: int, *, address: str = "127.0.0.1") -> None:
        prometheus: Any = importlib.import_module("prometheus_client")
        registry = prometheus.CollectorRegistry()

        def gauge(name: str, text: str, *labels: str) -> Any:
            return prometheus.Gauge(f"ntp_{name}", text, labels, registry=registry)

        self._step = gauge("step", "the newest committed step")
        self._epoch = gauge("epoch", "version of the membership")
        self._step_s = gauge("step_seconds", "duration of the newest step")
        self._goodput = gauge("goodput", "fraction of the time that went into steps that count")
        self._recoveries = gauge("recoveries", "completed recoveries")
        self._recovery_s = gauge("recovery_seconds", "duration of the newest recovery")
        self._slots = gauge("slots", "slots by state", "state")
        self._width = gauge("width", "width of the narrowest stage of a replica", "replica")
        self._micro_batches = gauge("micro_batches", "micro-batches of a replica in a step", "replica")
        self._copies_lag = gauge("copies_lag_steps", "steps since the newest copy")
        self._copies_bytes = gauge("copies_bytes", "size of the newest copies of all slots")
        self._compared = gauge("compared_step", "step after which replicas last compared their replicated state")
        self._troubles = prometheus.Counter("ntp_troubles", "failures, by kind of event", ["kind"], registry=registry)
        self._server, _ = prometheus.start_http_server(port, addr=address, registry=registry)

    @property
    def address(self) -> str:
        """URL of the page, with the actual port if 0 was asked for."""
        host, port = self._server.server_address[:2]
        return f"http://{host}:{port}/metrics"

    def receive(self, entry: RecordedEvent, job: JobState, *, news: bool, again: bool) -> None:  # noqa: ARG002  (its page begins anew with each relay)
        """Update the metrics from the state of the job."""
        if news and isinstance(entry.event, RankLost | Corrupted | CopyTrouble | KeyRestored | Hung | SaveFailed):
            self._troubles.labels(type(entry.event).__name__).inc()
        for gauge, value in (
            (self._step, job.step),
            (self._epoch, job.epoch),
            (self._step_s, job.step_s),
            (self._goodput, job.goodput),
            (self._recoveries, job.recoveries),
            (self._recovery_s, job.recovery_s),
            (self._copies_lag, max(0, job.step - job.copied_step) if job.copied_bytes else 0),
            (self._copies_bytes, sum(job.copied_bytes.values())),
            (self._compared, job.compared_step),
        ):
            gauge.set(value)
        for state in SlotState:
            self._slots.labels(state).set(list(job.slots.values()).count(state))
        for number, stages in enumerate(job.widths):
            self._width.labels(f"r{number}").set(min(stages))
            self._micro_batches.labels(f"r{number}").set(job.micro_batches[number])

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
