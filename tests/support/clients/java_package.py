"""The Java client: its folder, and Maven with what `make pulsars` has fetched."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

from broker.jvm.jars import jars
from tests.conftest import RUN_SECONDS
from tests.support.clients.runtimes import need, need_file

FOLDER = Path(__file__).parents[3] / "clients/java"
_FETCHED = Path(sys.executable).parents[1] / "java.stamp"


def need_maven() -> None:
    """Skips a test where Maven, or what the client is built with, is not there; fails it if CI is set."""
    need("mvn", "Maven")
    need_file(_FETCHED, "`make pulsars`")


def verify(environment: dict[str, str]) -> None:
    """Builds and tests the client and its example with what is there; `environment` names the service."""
    done = subprocess.run(
        ["mvn", "--quiet", "--batch-mode", "--offline", "verify"],
        cwd=FOLDER,
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


def tested(project: str) -> dict[str, tuple[int, int]]:
    """Returns the number of tests, and of those that were skipped, for each class of the last run."""
    reports = [ET.parse(file).getroot() for file in (FOLDER / project).glob("target/surefire-reports/*.xml")]
    return {one.attrib["name"]: (int(one.attrib["tests"]), int(one.attrib["skipped"])) for one in reports}


def compile_classes(folder: Path, *names: str) -> str:
    """Compiles classes of the client that use Pulsar's; returns the class path with them and Pulsar's."""
    classes = f"{jars('broker')}/*"
    sources = [str(FOLDER / f"client/src/main/java/delaylake/{name}.java") for name in names]
    command = ["javac", "-proc:none", "-d", str(folder), "-cp", classes, *sources]
    subprocess.run(command, check=True, timeout=RUN_SECONDS)
    return f"{folder}:{classes}"


def run_example(block: str, folder: Path) -> str:
    """Runs a class that uses the client alone, with no JARs but those that it needs; returns what it prints."""
    [jackson] = jars("broker").glob("jackson-core-*.jar")
    (folder / "Example.java").write_text(block)
    path = f"{FOLDER}/client/target/classes:{jackson}"
    command = ["java", "-XX:TieredStopAtLevel=1", "-cp", path, "Example.java"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
