"""A plugin of pytest: fixtures with the service in memory, for any topic, with one subscription."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from delaylake.testing import AsyncFakeClient, FakeClient


@pytest.fixture
def fake_lake() -> FakeClient:
    """A `delaylake.testing.FakeClient`. A test that wants subscriptions or a time of its own makes one itself."""
    from delaylake.testing import FakeClient  # here, so that pytest starts as quickly as without the plugin

    return FakeClient()


@pytest.fixture
def async_fake_lake() -> AsyncFakeClient:
    """A `delaylake.testing.AsyncFakeClient`."""
    from delaylake.testing import AsyncFakeClient

    return AsyncFakeClient()
