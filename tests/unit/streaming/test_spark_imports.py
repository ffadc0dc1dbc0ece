"""What is imported before Spark does, and what is not looked at."""

from __future__ import annotations

import importlib
import sys
import zipfile
from pathlib import Path

import pytest

from streaming.spark_imports import forget_jars


def test_jars_are_not_on_the_path_of_modules_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jar, other = tmp_path / "spark.jar", tmp_path / "program.zip"
    for archive, package in ((jar, "of_a_jar"), (other, "of_an_archive")):
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr(f"{package}/__init__.py", "")
            file.writestr(f"{package}/part.py", "")
    monkeypatch.setattr(sys, "path", [str(jar), str(other), *sys.path])
    for package in ("of_a_jar", "of_an_archive"):
        importlib.import_module(f"{package}.part")
        del sys.modules[package], sys.modules[f"{package}.part"]
    forget_jars()
    assert [path for path in [*sys.path, *sys.path_importer_cache] if str(jar) in path] == []
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("of_a_jar")
    importlib.import_module("of_an_archive.part")
