"""`delaylake audit`: checks by the Delta tables, and by the broker, that every message is accounted for."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.options import EngineOption, Output, OutputOption, engine_of, global_options, show
from jobs.text_table import table_text
from warehouse.audit.accounts import Audit, run_audit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from status.alerts import Alert
    from warehouse.audit.broker_comparison import Comparison


# Fields of `ComparedTopic` that have another name in the printed JSON.
_PRINTED_AS = {"durable": "booked", "not_durable": "not_booked"}


def audit(
    context: typer.Context,
    strict_now: Annotated[
        bool, typer.Option("--strict-now", help="Messages are overdue by the current time, not by the last delivery.")
    ] = False,
    engine: EngineOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Check that every message is pending, delivered once, cancelled or rejected, by the Delta tables and the broker.

    Exit status 1 if any message is lost, doubled, early, overdue, not seen, or delivered although cancelled or
    rejected, or if the running job says that a source topic stands still or a destination can't be written. The
    broker's entries are compared with those of the tables, if the broker answers.
    """
    now = time.time_ns() // 1_000_000
    settings = global_options(context).settings
    with engine_of(settings, engine) as chosen:
        result = run_audit(settings, now if strict_now else None, chosen)
    alerts = _alerts(settings.warehouse, now)
    show(output, _json(result, alerts), _text(result, alerts) if output is Output.TEXT else "")
    if alerts or not result.is_clean:
        raise typer.Exit(1)


def _alerts(warehouse: str, now: int) -> list[Alert]:
    """Returns the alerts of the running job that hold messages up, though all are accounted for.

    If the job does not run, there are none: those that it wrote last may be over.
    """
    from status.alerts import SLOW, STANDING, UNWRITABLE
    from status.job_status import known_status

    status = known_status(warehouse)
    if status is None or status.trouble(now) is not None:
        return []
    return [alert for alert in status.troubles if alert.kind in (STANDING, UNWRITABLE, SLOW)]


def _json(result: Audit, alerts: Sequence[Alert] = ()) -> dict[str, Any]:
    found = asdict(result) | {
        "ok": result.is_clean and not alerts,
        "troubles": [asdict(alert) for alert in alerts],
    }
    topics = [{_PRINTED_AS.get(name, name): n for name, n in t.items()} for t in found["comparison"]["topics"]]
    return found | {"comparison": found["comparison"] | {"topics": topics}}


def _text(result: Audit, alerts: Sequence[Alert]) -> str:
    columns = {
        "delivered": "delivered",
        "cancelled": "taken_back",
        "superseded": "superseded",
        "expired": "expired",
        "rejected": "rejected",
        "pending": "pending",
    }
    rows = [
        [row["topic"].removeprefix("persistent://"), row["subscription"], *(f"{row[n]:,}" for n in columns.values())]
        for row in result.counts
    ]
    lines = [table_text(["topic", "subscription", *columns], rows, right=columns)]
    for kind, found in result.findings.items():
        lines.append(f"{kind.replace('_', ' ')}: {found['count']:,}")
        lines += [
            f"  {example['topic']} {example['position']} {example['subscription']}".rstrip()
            for example in found["examples"]
        ]
    lines += [f"{alert.kind}: {alert.name}: {alert.text}" for alert in alerts]
    lines.append(_compared_text(result.comparison))
    verdict = "all accounted for" if result.is_clean else "NOT all accounted for"
    lines.append(f"{result.taken_in:,} messages taken in, {result.rejected:,} rejected: {verdict}")
    return "\n".join(lines)


def _compared_text(comparison: Comparison) -> str:
    if comparison.problem is not None:
        return f"compared with the tables alone: {comparison.problem}"
    sums = {
        name: sum(getattr(topic, name) for topic in comparison.topics)
        for name in ("entries", "durable", "not_durable", "no_message", "not_seen", "not_known", "trimmed")
    }
    parts = [
        f"{sums['durable']:,} are durable",
        f"{sums['not_durable']:,} not read or not durable yet",
        *(
            f"{sums[name]:,} {text}"
            for name, text in (
                ("no_message", "are markers, aborted or parts of a chunked message"),
                ("not_seen", "were not seen"),
                ("not_known", "are neither in the tables nor known to the broker"),
            )
            if sums[name]
        ),
    ]
    trimmed = f"; {sums['trimmed']:,} durable ones it no longer has" if sums["trimmed"] else ""
    return f"compared with the broker: of its {sums['entries']:,} entries {', '.join(parts)}{trimmed}"
