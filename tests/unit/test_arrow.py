"""No process imports pandas that does not want it, or keeps memory that Arrow has freed."""

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


def test_arrow_takes_memory_from_the_c_library_here_and_in_what_is_started() -> None:
    code = """
import subprocess, sys
import pyarrow as pa
from conf.arrow import use_system_memory
use_system_memory()
use_system_memory()
print(pa.default_memory_pool().backend_name, flush=True)
subprocess.run([sys.executable, "-c", "import pyarrow as pa; print(pa.default_memory_pool().backend_name)"], check=True)
"""
    assert run(code) == "system\nsystem\n"


def test_who_has_chosen_arrows_allocator_keeps_it() -> None:
    code = """
import os
os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "mimalloc"
import pyarrow as pa
from conf.arrow import use_system_memory
use_system_memory()
print(pa.default_memory_pool().backend_name)
"""
    assert run(code) == "mimalloc\n"
