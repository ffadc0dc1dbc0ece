"""The job's figures as Prometheus metrics, under Pulsar's name (`pulsar_delayed_message_index_*`) where it has one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from status.job_status import LATENESS_MILLIS, JobStatus, Lateness

_GAUGES = {
    "pulsar_delayed_message_index_loaded": ("in_state", "Messages that wait in the job's state."),
    "pulsar_delayed_message_index_size_bytes": ("state_memory_bytes", "Memory that Spark's state store takes."),
    "delaylake_pending_messages": ("pending", "Messages that wait, in state or in the delayed index."),
    "delaylake_in_flight_messages": ("in_flight", "Messages handed to the senders and not written down yet."),
    "delaylake_releases_in_progress": ("sending", "Releases that are being sent, in lanes."),
    "delaylake_held_up": ("is_held_up", "1 while the senders are behind and the source topics are not read."),
    "delaylake_waiting_commands": ("waiting_commands", "Commands that wait for messages that have not come."),
    "delaylake_schedule_keys": ("schedule_keys", "Schedule keys of which a message waits, or waited a while ago."),
    "delaylake_cold_schedule_keys": ("cold_schedule_keys", "Of these those that have left the job's state."),
}
_COUNTERS = {
    "delaylake_batches": ("batches", "Batches."),
    "delaylake_taken_messages": ("taken", "Messages that were taken in."),
    "delaylake_delivered_messages": ("delivered", "Messages that were delivered, counted for each subscription."),
    "delaylake_retried_messages": ("retried", "Of the delivered messages those that were retries."),
    "delaylake_dead_letters": ("dead_letters", "Of these the ones that went to topics of dead letters."),
    "delaylake_occurrences": ("occurrences", "Of the delivered messages the occurrences of recurring ones."),
    "delaylake_misfires": ("misfires", "How often a schedule left out what was missed, once for each subscription."),
    "delaylake_expired_messages": ("expired", "Messages that could not be sent by their end, for each subscription."),
    "delaylake_rejected_messages": ("rejected", "Messages and commands that were rejected."),
    "delaylake_left_out_messages": ("left_out", "Messages left to the cluster in which they were published."),
    "delaylake_shaped_messages": ("shaped", "Messages that got a later time by their subscription's rate or windows."),
    "delaylake_sealed_messages": ("sealed", "Messages that were sealed in buckets."),
    "delaylake_clock_steps": ("clock_steps", "How often the clock of the job's machine was set, ahead or back."),
    "delaylake_commands": ("commands", "Control commands' entries that were applied or answered."),
}


class JobCollector(Collector):
    """Collects a job's status as metrics; without a status only `delaylake_job_up`, which is 0 then.

    Args:
        status: returns the newest status; None: there is none.
    """

    def __init__(self, status: Callable[[], JobStatus | None]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics of the newest status."""
        status = self._status()
        now = time.time_ns() // 1_000_000
        is_up = status is not None and status.state == "running" and status.trouble(now) is None
        yield GaugeMetricFamily("delaylake_job_up", "1 while the job finishes batches.", is_up)
        if status is None:
            return
        for name, (attribute, text) in _GAUGES.items():
            yield GaugeMetricFamily(name, text, getattr(status, attribute))
        for name, (attribute, text) in _COUNTERS.items():
            yield CounterMetricFamily(name, text, getattr(status, attribute))
        yield CounterMetricFamily(
            "delaylake_batch_duration_seconds", "Time spent in batches.", status.batch_millis_sum / 1000
        )
        for name, text, millis in (
            ("lookahead", "How long before its time a message is handed out.", status.lookahead_millis),
            ("last_batch_duration", "Of the last batch.", status.batch_millis_last),
            ("last_batch_operator", "Of that in the stateful operator, all shards.", status.operator_millis_last),
            ("start_time", "When the job was started, since the epoch.", status.started_at),
            ("last_batch_time", "When the last batch ended, since the epoch.", status.last_batch_at),
            ("status_age", "Since the job told of itself.", now - status.updated_at),
        ):
            yield GaugeMetricFamily(f"delaylake_{name}_seconds", text, millis / 1000)
        alerts = GaugeMetricFamily(
            "delaylake_troubles",
            "Things that somebody has to look at; of kind not_seen, not_sent and failed how many entries or messages, "
            "of kind internal_error how many errors in a row.",
            labels=["kind", "name"],
        )
        for alert in status.troubles:
            alerts.add_metric([alert.kind, alert.name], alert.count)
        yield alerts
        shaped = GaugeMetricFamily(
            "delaylake_shaped_until_time_seconds",
            "When the last message goes out that a rate or windows have put off, since the epoch; 0: there is none.",
            labels=["topic", "subscription"],
        )
        for topic, names in status.shaped_until.items():
            for name, millis in names.items():
                shaped.add_metric([topic, name], millis / 1000)
        yield shaped
        for name, what, place in (("messages", "Messages", 0), ("bytes", "Payload bytes", 1)):
            resuming = GaugeMetricFamily(
                f"delaylake_resuming_{name}",
                f"{what} that were held back for a subscription that gets its messages again, and are still to go out.",
                labels=["topic", "subscription"],
            )
            for topic, subscriptions in status.resuming.items():
                for subscription, left in subscriptions.items():
                    resuming.add_metric([topic, subscription], left[place])
            yield resuming
        lateness = HistogramMetricFamily(
            "delaylake_lateness_seconds",
            "How late messages were sent. Those that came in too late to be planned are apart (kind=short_notice).",
            labels=["kind"],
        )
        for kind, values in (("planned", status.planned), ("short_notice", status.short_notice)):
            lateness.add_metric([kind], _buckets(values), values.sum_millis / 1000)
        yield lateness


def _buckets(lateness: Lateness) -> list[tuple[str, float]]:
    bounds = [*(str(millis / 1000) for millis in LATENESS_MILLIS), "+Inf"]
    return list(zip(bounds, accumulate(lateness.counts), strict=True))
