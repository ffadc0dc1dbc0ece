"""What the soak takes for growth."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.soak import trend

TIMES = np.linspace(0, 1, 480)
MEASURES = 60


def grows(values: np.ndarray) -> bool:
    return bool(trend(TIMES.tolist(), values.tolist(), MEASURES)["grows"])


@pytest.mark.slow
def test_what_only_goes_up_and_down_does_not_grow() -> None:
    chance = np.random.default_rng(1)
    saw = 100 + 40 * (np.arange(480) % 37) / 37
    assert not grows(saw)
    assert not grows(np.full(480, 7.0))
    flat = [grows(100 + 10 * chance.standard_normal(480)) for _ in range(200)]
    assert sum(flat) == 0
    outliers = np.where(np.arange(480) % 50 == 49, 5_000.0, 100.0 + chance.standard_normal(480))
    assert not grows(outliers)


@pytest.mark.parametrize("noise", [0.0, 5.0])
def test_what_grows_is_found(noise: float) -> None:
    values = 100 + 20 * TIMES + noise * np.random.default_rng(2).standard_normal(480)
    found = trend(TIMES.tolist(), values.tolist(), MEASURES)
    assert found["grows"]
    assert 17 < found["slope"] < 23
    assert not grows(values[::-1]), "it shrinks"
    assert not grows(100 + 0.5 * TIMES), "less than a hundredth of it in an hour"


def test_too_few_samples_say_nothing() -> None:
    assert trend([0, 1, 2], [1, 2, 3], 1)["interval"] == ["-inf", "inf"]
