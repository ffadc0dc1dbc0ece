"""What `delaylake api` prints once it answers."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import uvicorn

from tests.conftest import Run


@pytest.mark.slow
def test_the_url_is_printed_as_text_or_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delaylake_here: Run, caplog: pytest.LogCaptureFixture
) -> None:
    ports = []

    def run(_: uvicorn.Server, sockets: list[socket.socket]) -> None:
        for listener in sockets:
            ports.append(listener.getsockname()[1])
            listener.close()

    monkeypatch.setattr(uvicorn.Server, "run", run)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("jobs.commands.api.configure", lambda *_: None)
    (file := tmp_path / "settings.yaml").write_text(f"warehouse: file:{tmp_path}/warehouse")
    text = delaylake_here("--config", str(file), "api", "--port", "0").stdout
    shown = delaylake_here("--config", str(file), "api", "--port", "0", "--output", "json").stdout
    assert text == f"http://127.0.0.1:{ports[0]}\n"
    assert caplog.messages == 2 * [f"settings: {file}"]
    assert json.loads(shown) == {"url": f"http://127.0.0.1:{ports[1]}"}
