"""The messages of a plan, as objects."""

from __future__ import annotations

from streaming.release.task.planning.send_plan import Plan, PlannedSend, planned_sends


def sends_of(plan: Plan) -> list[PlannedSend]:
    """The planned messages of a plan, in the order of its rows."""
    return planned_sends(plan.lines, plan.sends)
