"""Mutated frames, through all that reads them; `make chaos` reads a million."""

from __future__ import annotations

import pytest

from tests.support.fuzzing.mutated import run


@pytest.mark.slow
def test_no_mutated_frame_does_harm() -> None:
    figures = run(seed=1, n=10_000)
    assert figures.n == 10_000
    assert min(figures.outcomes.get(kind, 0) for kind in ("read", "rejected", "chunk", "ProtocolError")) > 100
