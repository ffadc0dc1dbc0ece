"""An object storage on this machine: as much of S3's protocol as delta-rs uses, without authentication."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import threading
import uuid
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

import httpx


class ObjectStorage:
    """Serves one, empty at first, from a process of its own: delta-rs keeps Python's other threads from running while
    it waits for an answer.
    """

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.support.servers.object_storage"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])
        assert self._process.stdout is not None
        self._url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    @property
    def environment(self) -> dict[str, str]:
        """What delta-rs needs to use it."""
        return {
            "AWS_ENDPOINT_URL": self._url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }

    @property
    def refused(self) -> int:
        """How many times an object was to be made that was there already."""
        return int(httpx.get(self._url).text)

    def has(self, name: str) -> bool:
        """Whether there is an object `bucket/key`."""
        return httpx.head(f"{self._url}/{name}").status_code == 200

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Of a client that asked and went away."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lock = threading.Lock()
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.refused = 0


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer is one write, not one a line
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        name, query = self._target()
        if not name:
            self._answer(200, b"%d" % self.server.refused)
        elif "list-type" in query:
            self._list(name, query)
        elif (content := self.server.objects.get(name)) is None:
            self._answer(404)
        elif found := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")):
            first = int(found[1]) if found[1] else len(content) - int(found[2])
            end = int(found[2]) + 1 if found[1] and found[2] else len(content)
            part = content[first:end]
            self._answer(206, part, {"Content-Range": f"bytes {first}-{first + len(part) - 1}/{len(content)}"})
        else:
            self._answer(200, content)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        name, query = self._target()
        if "uploadId" in query:
            self.server.uploads[query["uploadId"]][int(query["partNumber"])] = self._body()
            self._answer(200)
        else:
            self._put(name, self._body())

    def do_POST(self) -> None:
        name, query = self._target()
        body = self._body()
        if "uploads" in query:
            upload = uuid.uuid4().hex
            self.server.uploads[upload] = {}
            xml = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            self._answer(200, xml.encode())
        elif "uploadId" in query:
            parts = self.server.uploads.pop(query["uploadId"])
            answer = b"<CompleteMultipartUploadResult><ETag>1</ETag></CompleteMultipartUploadResult>"
            self._put(name, b"".join(parts[number] for number in sorted(parts)), answer)
        else:
            assert "delete" in query
            keys = re.findall("<Key>(.*?)</Key>", body.decode())
            with self.server.lock:
                for key in keys:
                    self.server.objects.pop(f"{name}/{unescape(key)}", None)
            deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    def do_DELETE(self) -> None:
        self.server.objects.pop(self._target()[0], None)
        self._answer(204)

    def _put(self, name: str, content: bytes, answer: bytes = b"") -> None:
        with self.server.lock:
            is_refused = self.headers.get("If-None-Match") == "*" and name in self.server.objects
            if not is_refused:
                self.server.objects[name] = content
            self.server.refused += is_refused
        self._answer(412 if is_refused else 200, b"" if is_refused else answer)

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        prefix, after, delimiter = (query.get(name, "") for name in ("prefix", "start-after", "delimiter"))
        contents, prefixes = [], set()
        with self.server.lock:
            found = sorted((name.partition("/")[2], content) for name, content in self.server.objects.items()
                           if name.startswith(f"{bucket}/{prefix}"))  # fmt: skip
        for key, content in found:
            rest = key.removeprefix(prefix)
            if delimiter and delimiter in rest:
                prefixes.add(prefix + rest.partition(delimiter)[0] + delimiter)
            elif key > after:
                contents.append(
                    f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                    f"<ETag>{_etag(content)}</ETag><Size>{len(content)}</Size></Contents>"
                )
        folders = "".join(f"<CommonPrefixes><Prefix>{escape(p)}</Prefix></CommonPrefixes>" for p in sorted(prefixes))
        self._answer(200, f"<ListBucketResult>{''.join(contents)}{folders}</ListBucketResult>".encode())

    def _target(self) -> tuple[str, dict[str, str]]:
        """The object or bucket, and the query."""
        url = urlsplit(self.path)
        query = parse_qs(url.query, keep_blank_values=True)
        return unquote(url.path).strip("/"), {name: values[0] for name, values in query.items()}

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, status: int, content: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("ETag", _etag(content))
        self.send_header("Last-Modified", formatdate(usegmt=True))
        if status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def _etag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


if __name__ == "__main__":
    server = _Server()
    print(server.server_port, flush=True)
    server.serve_forever()
