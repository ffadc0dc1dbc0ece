"""The error about a recurring message's properties."""

from __future__ import annotations

from tracker.properties.schedule import BadScheduleError


class RecurrenceError(BadScheduleError):
    """A property of a recurring message can't be read. The error's message begins with the property's name.

    Attributes:
        property_name: name of the property.
        reason: the error's message without the name.
    """

    def __init__(self, property_name: str, reason: str) -> None:
        super().__init__(f"{property_name} {reason}")
        self.property_name = property_name
        self.reason = reason
