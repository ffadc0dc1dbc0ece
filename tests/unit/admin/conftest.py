"""What the API's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from admin.control.async_client import AsyncControlClient


@pytest.fixture(scope="package", autouse=True)
def no_broker() -> Iterator[None]:
    """The API does not try to reach a broker: to give that up takes seconds at each end of a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncControlClient, "_run", lambda self: setattr(self, "_has_tried", True))
        yield
