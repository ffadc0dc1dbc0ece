"""A million mutated frames, or MUTATIONS, of the numbers that begin with SEED: prints what became of them, as JSON."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.support.fuzzing.mutated import Figures, run


@pytest.mark.chaos
def test_no_mutated_frame_does_harm() -> None:
    n, seed = int(os.environ.get("MUTATIONS", "1000000")), int(os.environ.get("SEED", "1"))
    say_to = os.environ.get("MUTATIONS_LOG")  # a file, to follow it
    begun = time.process_time()

    def say(figures: Figures) -> None:
        told = json.dumps(asdict(figures) | {"seed": seed, "cpu_seconds": round(time.process_time() - begun, 1)})
        print(told, flush=True)
        if say_to:
            with Path(say_to).open("a") as file:
                file.write(told + "\n")

    figures = run(seed, n, say)
    say(figures)
    assert figures.n == n
    assert min(figures.outcomes.get(kind, 0) for kind in ("read", "rejected", "chunk", "ProtocolError")) > n // 100
