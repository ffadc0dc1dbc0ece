"""The session's JVM uses the archive of its classes, and starts without where that does not do."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import PySparkRuntimeError

from conf.settings import Settings, SparkSettings
from streaming import session

OPTIONS = "spark.driver.extraJavaOptions"
OWN_OPTIONS = f"{session._JVM_OPTIONS} -Djava.io.tmpdir={tempfile.gettempdir()}"


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, str]]:
    """What Spark is started with; it starts nothing."""
    found: list[Mapping[str, str]] = []

    def start(conf: Mapping[str, str]) -> Any:
        found.append(conf)
        if "SharedArchiveFile" in conf[OPTIONS]:
            raise PySparkRuntimeError(errorClass="JAVA_GATEWAY_EXITED", messageParameters={})
        return SimpleNamespace()

    monkeypatch.setattr(session, "_start", start)
    monkeypatch.setenv("DELAYLAKE_CACHE", str(tmp_path / "cache"))
    for name in (
        "SPARK_HOME",
        "PYSPARK_GATEWAY_PORT",
        "PYSPARK_PYTHON",
        "PYSPARK_DRIVER_PYTHON",
        "SPARK_LAUNCHER_OPTS",
    ):
        monkeypatch.setenv(name, "")  # so that what is set is undone
        monkeypatch.delenv(name)
    return found


def test_the_home_stays_and_a_start_notes_its_classes(tmp_path: Path, starts: list[Mapping[str, str]]) -> None:
    session.create_session(Settings(), "a")
    home = Path(os.environ["SPARK_HOME"])
    assert home.parent == tmp_path / "cache"
    assert list((home / "jars").glob("spark-core*.jar"))
    del os.environ["SPARK_HOME"]
    session.create_session(Settings(), "a")
    assert os.environ["SPARK_HOME"] == str(home)
    notes = {start[OPTIONS].split(".jsa")[0].rsplit(".", 2)[0] for start in starts}
    assert len(notes) == 1
    assert notes.pop().startswith(f"{OWN_OPTIONS} -XX:DumpLoadedClassList={tmp_path}/cache/spark-")


def test_a_jvm_that_does_not_start_with_the_archive_is_started_without(
    tmp_path: Path, starts: list[Mapping[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").mkdir()
    archive = tmp_path / "cache" / "spark-0123456789ab-3.jsa"
    archive.write_text("abc")
    monkeypatch.setattr(session, "_archive_options", lambda home, conf: [f"-XX:SharedArchiveFile={archive}"])
    session.create_session(Settings(), "a")
    assert [start[OPTIONS] for start in starts] == [
        f"{OWN_OPTIONS} -XX:SharedArchiveFile={archive}",
        OWN_OPTIONS,
    ]
    assert not archive.exists()


def test_the_environment_of_its_processes_can_be_set_from_outside(
    starts: list[Mapping[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "7")
    session.create_session(Settings(), "a")
    assert os.environ["MALLOC_ARENA_MAX"] == "7"
    assert os.environ["OPENBLAS_NUM_THREADS"] == "1"


def test_own_options_of_the_jvm_are_kept(starts: list[Mapping[str, str]]) -> None:
    session.create_session(Settings(spark=SparkSettings(conf={OPTIONS: "-Xss8m"})), "a")
    assert starts[0][OPTIONS] == "-Xss8m"


def test_an_archive_that_own_options_name_is_not_removed_where_the_jvm_does_not_start(
    tmp_path: Path, starts: list[Mapping[str, str]]
) -> None:
    archive = tmp_path / "own-3.jsa"
    archive.write_text("abc")
    with pytest.raises(PySparkRuntimeError):
        session.create_session(Settings(spark=SparkSettings(conf={OPTIONS: f"-XX:SharedArchiveFile={archive}"})), "a")
    assert len(starts) == 1
    assert archive.exists()


def test_without_a_cache_it_starts_all_the_same(
    tmp_path: Path, starts: list[Mapping[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DELAYLAKE_CACHE", str(tmp_path / "file"))
    session.create_session(Settings(), "a")
    assert starts[0][OPTIONS] == OWN_OPTIONS
    assert list(Path(os.environ["SPARK_HOME"]).glob("jars/*.jar"))


PROTECTED = {
    "spark.authenticate": "true",
    "spark.network.crypto.enabled": "true",
    "spark.network.crypto.cipher": "AES/GCM/NoPadding",
    "spark.io.encryption.enabled": "true",
}


def started(starts: list[Mapping[str, str]], monkeypatch: pytest.MonkeyPatch, master: str, **conf: Any) -> set[Any]:
    """Returns what Spark is started with on a master."""
    added: list[str] = []
    context = SimpleNamespace(addPyFile=added.append)

    def start(given: Mapping[str, str]) -> Any:
        starts.append(given)
        return SimpleNamespace(sparkContext=context)

    monkeypatch.setattr(session, "_start", start)
    settings = Settings(spark=SparkSettings(master=master, conf=conf))
    session.create_session(settings, "a")
    return set(starts[-1].items())


@pytest.mark.parametrize("master", ["k8s://https://kubernetes:443", "yarn", "spark://master:7077"])
def test_on_a_cluster_driver_and_executors_know_each_other_and_whisper(
    starts: list[Mapping[str, str]], monkeypatch: pytest.MonkeyPatch, master: str
) -> None:
    conf = {"spark.authenticate.secret": "s3cr3t"} if master.startswith("spark:") else {}
    assert started(starts, monkeypatch, master, **conf) >= PROTECTED.items()


def test_a_standalone_cluster_without_a_secret_is_refused(
    starts: list[Mapping[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        session.ClusterError, match=r"spark://master:7077 needs a secret: set spark.authenticate.secret"
    ):
        started(starts, monkeypatch, "spark://master:7077")
    assert starts == []


def test_who_turns_it_off_says_so(starts: list[Mapping[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    off = {"spark.authenticate": False, "spark.network.crypto.enabled": "false"}
    given = started(starts, monkeypatch, "spark://master:7077", **off)
    assert ("spark.network.crypto.enabled", "false") in given


def test_on_one_machine_nothing_changes(starts: list[Mapping[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    given = dict(started(starts, monkeypatch, "local[2]"))
    assert not PROTECTED.keys() & given.keys()


@pytest.mark.parametrize(
    ("master", "is_cluster"),
    [
        ("local", False),
        ("local[*]", False),
        ("local[20,4]", False),
        ("local-cluster[2,1,1024]", True),
        ("spark://a:7077", True),
        ("k8s://https://a:443", True),
        ("yarn", True),
    ],
)
def test_executors_of_a_cluster_may_live_on_without_their_driver(master: str, is_cluster: bool) -> None:
    assert session.is_on_cluster(SimpleNamespace(sparkContext=SimpleNamespace(master=master))) is is_cluster  # type: ignore[arg-type]
