"""The image and the manifests fit the program: what they start, name, mount and ask for is there."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from fastapi.testclient import TestClient

from admin.app import create_app
from admin.security.authentication import check_address
from admin.security.refusals import TABLE as REFUSALS
from conf.settings import Settings, load_settings, local_path
from jobs import cli
from tests.conftest import RUN_SECONDS

pytestmark = pytest.mark.usefixtures("clean_environment")

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "conf" / "kubernetes"
ENTRY_POINT = FOLDER / "entrypoint.sh"
DOCKERFILE = re.sub(r"\\\n\s*", "", (FOLDER / "Dockerfile").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def documents() -> Iterator[dict[str, Any]]:
    for file in sorted(FOLDER.glob("*.yaml")):
        yield from yaml.safe_load_all(file.read_text())


MANIFESTS = {(d["kind"], d["metadata"]["name"]): d for d in documents()}
JOB = MANIFESTS["SparkApplication", "delaylake"]["spec"]
DRIVER, EXECUTOR = JOB["driver"], JOB["executor"]
API = MANIFESTS["Deployment", "delaylake-api"]["spec"]["template"]
API_POD = API["spec"]
(API_CONTAINER,) = API_POD["containers"]
(DRIVER_CONTAINER,) = DRIVER["template"]["spec"]["containers"]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    file = tmp_path / "settings.yaml"
    file.write_text(MANIFESTS["ConfigMap", "delaylake"]["data"]["delaylake.yaml"])
    return load_settings(file)


def place(volume: dict[str, Any]) -> str:
    """What a volume is: a claim, or scratch space."""
    return "scratch" if "emptyDir" in volume else f"claim {volume['persistentVolumeClaim']['claimName']}"


def mounts(part: dict[str, Any]) -> dict[str, str]:
    """What a driver or executor has, by path."""
    volumes = {v["name"]: place(v) for v in JOB["volumes"]}
    return {
        **{m["mountPath"]: volumes[m["name"]] for m in part["volumeMounts"]},
        **{m["path"]: f"config {m['name']}" for m in part.get("configMaps", [])},
        **{m["path"]: f"secret {m['name']}" for m in part["secrets"]},
    }


def api_mounts() -> dict[str, str]:
    def source(volume: dict[str, Any]) -> str:
        if "configMap" in volume:
            return f"config {volume['configMap']['name']}"
        if "secret" in volume:
            return f"secret {volume['secret']['secretName']}"
        return place(volume)

    volumes = {v["name"]: source(v) for v in API_POD["volumes"]}
    return {m["mountPath"]: volumes[m["name"]] for m in API_CONTAINER["volumeMounts"]}


def environment() -> dict[str, str]:
    """The image's."""
    (line,) = re.findall(r"^ENV (.*)$", DOCKERFILE, re.MULTILINE)
    return dict(part.split("=", 1) for part in shlex.split(line))


PODS = {"driver": mounts(DRIVER), "executor": mounts(EXECUTOR), "api": api_mounts()}
COMMANDS = {
    "run": JOB["arguments"],
    "api": API_CONTAINER["args"][1:],
    "status": DRIVER_CONTAINER["livenessProbe"]["exec"]["command"][1:],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_line_takes_what_is_started(command: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.argv", ["delaylake", *COMMANDS[command], "--help"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert f"Usage: delaylake {command}" in capsys.readouterr().out


@pytest.mark.parametrize(("command", "pod"), [("run", "driver"), ("status", "driver"), ("api", "api")])
def test_the_settings_are_where_the_commands_look(command: str, pod: str) -> None:
    arguments = COMMANDS[command]
    file = PurePosixPath(arguments[arguments.index("--config") + 1])
    assert PODS[pod][str(file.parent)] == "config delaylake"
    assert file.name in MANIFESTS["ConfigMap", "delaylake"]["data"]


@pytest.mark.parametrize("pod", PODS)
def test_each_pod_has_the_tables_the_checkpoint_and_the_brokers_token(settings: Settings, pod: str) -> None:
    for uri in (settings.warehouse, settings.checkpoint):
        assert PODS[pod][str(PurePosixPath(local_path(uri)).parent)] == "claim delaylake"
    assert settings.pulsar.token_file is not None
    assert PODS[pod][str(settings.pulsar.token_file.parent)] == "secret delaylake-pulsar"


def test_what_is_mounted_exists_or_is_made_as_the_docs_say(settings: Settings) -> None:
    assert {"ReadWriteMany"} == set(MANIFESTS["PersistentVolumeClaim", "delaylake"]["spec"]["accessModes"])
    text = (ROOT / "docs" / "deployment.md").read_text()
    secrets = dict(re.findall(r"kubectl create secret generic (\S+) --from-file=([^=\s]+)=", text))
    assert settings.auth.token_secret_key is not None
    of_api = Path(local_path(settings.auth.token_secret_key.get_secret_value()))
    keys = {"delaylake-pulsar": settings.pulsar.token_file, "delaylake-api": of_api}
    assert secrets == {name: file.name for name, file in keys.items() if file}
    assert PODS["api"][str(of_api.parent)] == "secret delaylake-api"
    for source in {source for pod in PODS.values() for source in pod.values()}:
        if source == "scratch":
            continue
        kind, name = source.split()
        kinds = {"config": "ConfigMap", "claim": "PersistentVolumeClaim"}
        assert name in secrets if kind == "secret" else (kinds[kind], name) in MANIFESTS


def test_ports_are_the_settings(settings: Settings) -> None:
    check_address(settings.api.host, settings.auth)
    assert settings.api.host == "0.0.0.0"
    ports = {p["name"]: p["containerPort"] for p in API_CONTAINER["ports"]}
    assert ports == {"http": settings.api.port}
    (service_port,) = MANIFESTS["Service", "delaylake-api"]["spec"]["ports"]
    assert ports[service_port["targetPort"]] == service_port["port"] == settings.api.port
    assert int(API["metadata"]["annotations"]["prometheus.io/port"]) == settings.api.port
    labels = API["metadata"]["labels"]
    assert MANIFESTS["Service", "delaylake-api"]["spec"]["selector"] == labels
    assert MANIFESTS["Deployment", "delaylake-api"]["spec"]["selector"]["matchLabels"] == labels


def test_probes_and_metrics_are_routes_that_need_no_token(settings: Settings, tmp_path: Path) -> None:
    auth = {**settings.auth.model_dump(), "token_secret_key": "data:;base64," + "a" * 44}
    pulsar = {"service_url": "pulsar://127.0.0.1:1", "admin_url": "http://127.0.0.1:1"}
    made = Settings(warehouse=str(tmp_path), checkpoint=f"{tmp_path}/checkpoint", auth=auth, pulsar=pulsar)  # type: ignore[arg-type]
    probes = [API_CONTAINER[name]["httpGet"] for name in ("livenessProbe", "readinessProbe")]
    with TestClient(create_app(made)) as client:
        codes = [client.get(probe["path"]).status_code for probe in probes]
        assert codes == [200, 503]  # it is up, and without a broker not ready
        assert client.get(API["metadata"]["annotations"]["prometheus.io/path"]).status_code == 200
        assert client.get("/admin/v2/persistent/public/default/orders/delayed").status_code == 401
    assert {probe["port"] for probe in probes} == {"http"}


def test_an_executor_alone_has_slots_for_all_tasks(settings: Settings) -> None:
    shards, lanes = settings.tracker.shard_count, settings.release.lanes
    assert EXECUTOR["cores"] >= shards + 2 * lanes * shards
    assert EXECUTOR["instances"] >= 2


def test_the_driver_has_the_time_and_the_jvm_that_the_program_wants() -> None:
    from streaming.query import _STOP_SECONDS
    from streaming.session import _JVM_OPTIONS

    assert DRIVER["javaOptions"] == _JVM_OPTIONS
    assert DRIVER["terminationGracePeriodSeconds"] > 2 * _STOP_SECONDS
    assert DRIVER_CONTAINER["name"] == "spark-kubernetes-driver"
    assert JOB["restartPolicy"]["type"] == "Always"


def test_the_image_has_the_program_where_the_manifests_look() -> None:
    packages = PurePosixPath(environment()["SPARK_HOME"]).parent
    assert PurePosixPath(environment()["SPARK_HOME"]).name == "pyspark"
    main = PurePosixPath(JOB["mainApplicationFile"].removeprefix("local://")).relative_to(packages)
    assert (ROOT / main).samefile(ROOT / "jobs" / "__main__.py")
    submitted = re.findall(r"^spark-submit .* (\S+\.py) ", (ROOT / "docs" / "deployment.md").read_text(), re.MULTILINE)
    assert submitted == [str(main)]
    assert PROJECT["project"]["scripts"] == {"delaylake": "jobs.__main__:main"}
    pythons = set(re.findall(r"^FROM python:(\d+\.\d+)", DOCKERFILE, re.MULTILINE))
    assert {packages.parent.name} == {f"python{python}" for python in pythons}
    assert PROJECT["project"]["requires-python"] == f">={pythons.pop()}"
    prefix = packages.parents[2]
    assert f"COPY --from=build {prefix} {prefix}" in DOCKERFILE
    assert environment()["PATH"].startswith(f"{prefix}/bin:")
    assert environment()["PYSPARK_PYTHON"] == environment()["PYSPARK_DRIVER_PYTHON"] == f"{prefix}/bin/python"
    assert {API_CONTAINER["args"][0], DRIVER_CONTAINER["livenessProbe"]["exec"]["command"][0]} <= {
        *PROJECT["project"]["scripts"]
    }


def test_the_image_is_made_of_what_is_here() -> None:
    copied = [p for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE)
              for p in line.split()[:-1] if not p.startswith("--")]  # fmt: skip
    assert all((ROOT / path).exists() for path in copied)
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {"requirements.lock", "pyproject.toml", "clients/python", PROJECT["project"]["readme"], *packages} <= set(
        copied
    )
    assert "--no-build-isolation --require-hashes -r requirements.lock" in DOCKERFILE
    for build in (DOCKERFILE, (ROOT / "Makefile").read_text()):
        for line in re.findall(r"pip[ \w-]* (?:install|wheel) (?:.|\\\n)*", build):
            assert "--require-hashes" in line or "--no-index" in line or "--no-deps" in line or line.endswith(" uv"), (
                line
            )
    assert f"pyspark=={JOB['sparkVersion']}" in (ROOT / "requirements.lock").read_text()
    assert {JOB["image"], API_CONTAINER["image"]} == {f"delaylake:{version('delaylake')}"}


def test_what_builds_pyspark_is_locked_as_everything_else_is() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    requirements = re.findall(
        r"^(\S+==\S+)((?: \\\n    --hash=\S+)+)", (ROOT / "requirements-build.lock").read_text(), re.M
    )
    assert [name.split("==")[0] for name, _ in requirements] == ["setuptools"]
    for name, hashes in requirements:
        assert f"{name}{hashes}" in lock


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    """Nor does ShellCheck, which it runs on the image's commands."""
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, "--no-color", FOLDER / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    wrong = b"FROM python:3.11-slim-bookworm\nRUN cd $HOME && apt-get install tini\nCOPPY a b\n"
    assert subprocess.run([hadolint, "-"], input=wrong, capture_output=True).returncode == 1


def test_the_image_has_the_programs_that_are_started_in_it() -> None:
    """And of Java the one that the tests run on, at least: the Python of the image is checked above."""
    (installed,) = re.findall(r"apt-get install -y --no-install-recommends ([\w. -]+)", DOCKERFILE)
    (java,) = re.findall(r"openjdk-(\d+)-jre-headless", installed)
    (needed,) = re.findall(r"-ge (\d+) \] \|\| missing\+=\(\"JDK", (ROOT / "Makefile").read_text())
    assert int(java) >= int(needed)
    assert f"JDK {needed}+" in (ROOT / "README.md").read_text()
    packages = {"pkill": "procps", "tini": "tini", "java": f"openjdk-{java}-jre-headless"}
    started = set(re.findall(r"\b(pkill|tini|java) -", ENTRY_POINT.read_text())) | {"java"}
    assert {packages[program] for program in started} == set(installed.split())


def test_nothing_runs_as_root() -> None:
    (user,) = re.findall(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE)
    assert f"useradd --uid {user} " in DOCKERFILE
    for context in (DRIVER["podSecurityContext"], EXECUTOR["podSecurityContext"], API_POD["securityContext"]):
        seccomp = {"type": "RuntimeDefault"}
        assert context == {"runAsNonRoot": True, "fsGroup": int(user), "seccompProfile": seccomp}
    (entry_point,) = re.findall(r'^ENTRYPOINT \["(.*)"\]$', DOCKERFILE, re.MULTILINE)
    assert f"COPY --chmod=755 {ENTRY_POINT.relative_to(ROOT)} {entry_point}" in DOCKERFILE


def test_no_container_may_more_than_it_has_to() -> None:
    for context in (DRIVER["securityContext"], EXECUTOR["securityContext"], API_CONTAINER["securityContext"]):
        assert context == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    # Where the root is read-only there is a place for what is written: temporary files, what Spark ships, caches.
    for pod in ("driver", "executor"):
        (work,) = re.findall(r"^WORKDIR (/opt/\S+)$", DOCKERFILE, re.MULTILINE)
        assert {path for path, source in PODS[pod].items() if source == "scratch"} == {"/tmp", "/home/delaylake", work}
    assert PODS["api"]["/tmp"] == "scratch"


def test_only_the_driver_has_a_token_of_kubernetes() -> None:
    assert API_POD["automountServiceAccountToken"] is False
    assert EXECUTOR["template"]["spec"]["automountServiceAccountToken"] is False
    assert "serviceAccount" in DRIVER


def test_the_tables_are_read_only_for_the_api_but_its_own(settings: Settings, tmp_path: Path) -> None:
    of_data = [mount for mount in API_CONTAINER["volumeMounts"] if mount["name"] == "data"]
    root = PurePosixPath(local_path(settings.warehouse)).parent
    writable = [mount for mount in of_data if not mount.get("readOnly")]
    assert [mount["mountPath"] for mount in of_data if mount.get("readOnly")] == [str(root)]
    assert [mount["mountPath"] for mount in writable] == [f"{local_path(settings.warehouse)}/{REFUSALS}"]
    assert [str(root / mount["subPath"]) for mount in writable] == [mount["mountPath"] for mount in writable]
    (before,) = API_POD["initContainers"]
    assert before["args"] == ["mkdir", "-p", writable[0]["mountPath"]]
    assert before["securityContext"] == API_CONTAINER["securityContext"]
    assert before["image"] == API_CONTAINER["image"]


def test_who_may_reach_whom_is_said() -> None:
    of_job, of_api = (MANIFESTS["NetworkPolicy", f"delaylake-{name}"]["spec"] for name in ("job", "api"))
    roles = [{"key": "spark-role", "operator": "In", "values": ["driver", "executor"]}]  # Spark's own labels
    assert of_job["podSelector"] == {"matchExpressions": roles}
    assert of_job["ingress"] == [{"from": [{"podSelector": {"matchExpressions": roles}}]}]
    labels = {"matchLabels": API["metadata"]["labels"]}
    assert of_api["podSelector"] == labels
    assert of_api["ingress"][0]["ports"] == [{"port": "http"}]
    out = MANIFESTS["NetworkPolicy", "delaylake-out"]["spec"]
    assert out["podSelector"] == labels
    reached = {port["port"] for rule in out["egress"] for port in rule["ports"]}
    config = yaml.safe_load(MANIFESTS["ConfigMap", "delaylake"]["data"]["delaylake.yaml"])["pulsar"]
    assert {urlsplit(config[name]).port for name in ("service_url", "admin_url")} <= reached


def executable(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)


def test_the_entry_point_runs_other_commands_as_they_are_and_not_as_the_first_process(tmp_path: Path) -> None:
    executable(tmp_path / "tini", '#!/bin/sh\nprintf "%s\\n" "$@"\n')
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run([ENTRY_POINT, "echo", "a  b", "$HOME"], capture_output=True, text=True, env={"PATH": path})
    assert done.stdout.splitlines() == ["-s", "--", "echo", "a  b", "$HOME"]


def test_the_entry_point_starts_an_executor_as_spark_asks(tmp_path: Path) -> None:
    executable(tmp_path / "tini", '#!/bin/sh\nprintf "%s\\n" "$@"\n')
    names = "DRIVER_URL EXECUTOR_ID EXECUTOR_CORES EXECUTOR_MEMORY APPLICATION_ID EXECUTOR_POD_IP EXECUTOR_POD_NAME"
    asked = {f"SPARK_{name}": name.lower() for name in [*names.split(), "RESOURCE_PROFILE_ID"]}
    asked |= {"SPARK_JAVA_OPT_0": "-Da=b c", "SPARK_JAVA_OPT_1": "-Dd", "SPARK_HOME": "/spark"}
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run([ENTRY_POINT, "executor"], capture_output=True, text=True, env={**asked, "PATH": path})
    arguments = done.stdout.splitlines()
    assert arguments[:7] == ["-s", "--", "java", "-Da=b c", "-Dd", "-Xmsexecutor_memory", "-Xmxexecutor_memory"]
    given = dict(zip(arguments[10::2], arguments[11::2], strict=True))
    assert arguments[9] == "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"
    assert given == {
        "--driver-url": "driver_url",
        "--executor-id": "executor_id",
        "--cores": "executor_cores",
        "--app-id": "application_id",
        "--hostname": "executor_pod_ip",
        "--resourceProfileId": "resource_profile_id",
        "--podName": "executor_pod_name",
    }


@pytest.mark.parametrize("file", ["__main__.py", "cli.py"])
def test_the_entry_point_lets_a_driver_finish(file: str, tmp_path: Path) -> None:
    """SIGTERM comes to the program, not to what started it, and the exit status is the program's."""
    program = tmp_path / "jobs" / file
    executable(
        program,
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "print(sys.argv[1:], flush=True)\n"
        "signal.pause()\n",
    )
    submit = f'#!/bin/bash\ntrap "exit 99" TERM\necho "$@"\n{sys.executable} {program} run &\nwait $!\n'
    executable(tmp_path / "spark" / "bin" / "spark-submit", submit)
    variables = {"SPARK_HOME": str(tmp_path / "spark"), "SPARK_DRIVER_BIND_ADDRESS": "10.0.0.1"}
    command = [str(ENTRY_POINT), "driver", "--class", "C", "local:///x.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables}) as process:
        assert process.stdout is not None
        submitted = "--conf spark.driver.bindAddress=10.0.0.1 --deploy-mode client --class C local:///x.py\n"
        assert process.stdout.readline() == submitted
        assert process.stdout.readline() == "['run']\n"
        process.terminate()
        assert process.wait(timeout=RUN_SECONDS) == 7


def test_the_entry_point_ends_a_driver_that_has_not_started_its_program(tmp_path: Path) -> None:
    executable(tmp_path / "spark" / "bin" / "spark-submit", "#!/bin/bash\necho starting\nexec sleep 600\n")
    variables = {"SPARK_HOME": str(tmp_path / "spark"), "SPARK_DRIVER_BIND_ADDRESS": "10.0.0.1"}
    command = [str(ENTRY_POINT), "driver", "local:///x.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables}) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "starting\n"
        process.terminate()
        assert process.wait(timeout=RUN_SECONDS) == 128 + signal.SIGTERM
