"""The service in memory passes the steps that all clients pass on the service."""

from __future__ import annotations

from delaylake.testing import Backoff, FakeClient

from tests.support.clients import contract


def test_the_service_in_memory_passes_the_steps_of_all_clients() -> None:
    lake = FakeClient({"orders": {"billing": "Shared", "audit": "Failover"}}, backoff=Backoff(attempts=0))
    n = contract.check(lambda token: lake, "orders", lambda: lake.now, frozenset({"http"}), before_step=lake.advance)
    assert n > 40
