"""What the tests of commands share."""

from __future__ import annotations

import pytest

from tests.support.tracker.control_desk import Desk


@pytest.fixture
def desk() -> Desk:
    return Desk()
