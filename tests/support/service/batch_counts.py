"""What a batch of the job counts."""

from __future__ import annotations

COUNTS = {
    "delayed": 70, "loaded": 20, "in_flight": 5, "waiting_commands": 1, "sink_millis": 300, "taken": 10, "rejected": 1,
    "left_out": 2, "sealed": 4, "commands": 2, "operator_millis": 120, "misfires": 3,
    "schedule_keys": 9, "cold_schedule_keys": 6,
}  # fmt: skip
