"""The tests. What they share shows the values of an assertion that fails, as they do."""

import pytest

pytest.register_assert_rewrite("tests.support")
