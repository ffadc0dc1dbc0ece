"""The client with the oldest httpx and protobuf that it takes: applications have other libraries that go no further."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.clients.runtimes import need_file

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
OLDEST = Path(sys.executable).parents[1] / "oldest"

PROGRAM = """
import http.server, json, threading
from datetime import timedelta
from importlib.metadata import version

from google.protobuf.internal import api_implementation

from delaylake import Client, NotFound
from delaylake.commands import Ids
from delaylake.control import RequestFactory
from delaylake.message_ids import MessageId
from delaylake.wire.delaylake_pb2 import APPLIED, ControlCommand, ControlOutcome

[made] = RequestFactory("t", "persistent://public/default/orders", ["billing"], request_id="r").make(
    "reschedule", Ids([MessageId(7, 0)], [5]), deliver_at=9
)
read = ControlCommand.FromString(made.command.SerializeToString())
assert read == made.command and read.WhichOneof("operation") == "reschedule"
assert read.reschedule.deliver_at == 9 and read.reschedule.entries[0].ledger_id == 7
outcome = ControlOutcome(request_id="r", subscription="billing", result=APPLIED)
assert ControlOutcome.FromString(outcome.SerializeToString()) == outcome


class Api(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        is_known = "/orders/" in self.path
        body = {"messageId": "7:0:-1:-1", "deliverAt": 9} if is_known else {"reason": "no such topic"}
        content = json.dumps(body).encode()
        self.send_response(201 if is_known else 404)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        pass


with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with Client(f"http://127.0.0.1:{server.server_port}") as lake:
        assert lake.schedule("orders", b"x", after=timedelta(hours=1)) == MessageId(7, 0)
        try:
            lake.schedule("others", b"x", after=timedelta(hours=1))
        except NotFound as error:
            assert str(error) == "no such topic"
        else:
            raise AssertionError
    server.shutdown()
print(json.dumps({"protobuf": version("protobuf"), "httpx": version("httpx"), "kind": api_implementation.Type()}))
"""


@pytest.mark.parametrize("kind", ["upb", "python"])
def test_the_client_works_with_the_oldest_libraries_that_it_takes(kind: str) -> None:
    need_file(OLDEST, "`make programs`")
    project = tomllib.loads((ROOT / "clients/python/pyproject.toml").read_text())["project"]
    takes = [*project["dependencies"], *project["optional-dependencies"]["pulsar"]]
    oldest = {text.partition(">=")[0]: text.partition(">=")[2].partition(",")[0] for text in takes}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={
            **os.environ,
            "PYTHONPATH": f"{OLDEST}:{ROOT / 'clients/python/src'}",
            "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": kind,
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    used = json.loads(done.stdout)
    assert used["kind"] == kind
    for library in ("protobuf", "httpx"):
        assert used[library].startswith(oldest[library]), used
