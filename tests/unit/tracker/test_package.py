"""What the package offers, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tracker


@pytest.mark.parametrize("name", tracker.__all__)
def test_each_name_is_what_its_module_has(name: str) -> None:
    found = getattr(tracker, name)
    assert found is getattr(sys.modules[tracker._MODULES[name]], name)


def test_all_names_that_are_offered_have_a_module() -> None:
    assert sorted(tracker.__all__) == sorted(tracker._MODULES)


def test_a_name_that_is_not_offered_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'tracker' has no attribute 'Shards'"):
        tracker.Shards  # noqa: B018


def test_a_constant_of_the_tracker_costs_no_import_of_arrow() -> None:
    code = "import sys, tracker.due_time; sys.exit('pyarrow' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
