"""No process imports pandas that does not want it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "module",
    ["streaming.daemon", "streaming.source.reader", "streaming.query", "admin.app", "warehouse.maintenance.maintain"],
)
def test_what_a_process_imports_leaves_pandas_out(module: str) -> None:
    code = f"""
import sys, {module}
import pyarrow as pa
pa.array([1, None]), pa.table({{"a": ["b"]}}).to_pylist()
print("pandas" in sys.modules)
"""
    assert run(code) == "False\n"


@pytest.mark.parametrize("module", ["streaming.daemon", "streaming.session"])
def test_what_spark_asks_about_numpy_leaves_pandas_out(module: str) -> None:
    code = f"""
import sys, {module}
from streaming.spark_imports import import_without_pandas
if "{module}" == "streaming.session":
    import_without_pandas()
modules = set(sys.modules)
from pyspark.sql.types import NumpyScalarConverter
import pyspark.worker, numpy, streaming.entry_points
print(NumpyScalarConverter().can_convert(numpy.int64(1)), "pandas" in sys.modules)
if "{module}" == "streaming.daemon":
    print(sorted(set(sys.modules) - modules))
"""
    assert run(code) in ("True False\n", "True False\n[]\n")


def test_who_wants_pandas_gets_it() -> None:
    code = """
import sys
from conf.arrow import leave_pandas_out
leave_pandas_out()
import pyarrow as pa
print(pa.table({"a": [1]}).to_pandas()["a"].sum(), pa.array(sys.modules["pandas"].Series([1, 2])).to_pylist())
leave_pandas_out()
"""
    assert run(code) == "1 [1, 2]\n"
