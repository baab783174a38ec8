"""A Hub for tests: a few models, served over the requests of huggingface_hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Models of the Hub, and the requests it received."""

    models: Mapping[str, Mapping[str, bytes]]
    gated: frozenset[str] = frozenset()
    url: str = ""
    asked: list[str] = field(default_factory=list)


@contextmanager
def hub_of(models: Mapping[str, Mapping[str, bytes]], *, gated: str = "") -> Iterator[Hub]:
    """`models`: id -> file -> bytes, all at one revision, which is also `main`."""
    hub = Hub(models, frozenset({gated}))

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.asked.append(urlsplit(self.path).path)
            status, headers, body = answer(hub, urlsplit(self.path).path)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Keeps requests out of a test's output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def answer(hub: Hub, path: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body for a path."""
    parts = path.strip("/").split("/")
    about = parts[:2] == ["api", "models"]
    name = "/".join(parts[2:4] if about else parts[:2])
    rest = parts[4:] if about else parts[2:]
    files = hub.models.get(name)
    if files is None:
        return refused(404, "RepoNotFound")
    if name in hub.gated:
        return refused(403, "GatedRepo")
    if len(rest) > 1 and rest[1] not in (SHA, "main"):
        return refused(404, "RevisionNotFound")
    if about and rest[:1] == ["tree"]:
        tree = [
            {"type": "file", "path": one, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
            for one, body in files.items()
        ]
        return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
    if about:
        siblings = [{"rfilename": one, "size": len(body)} for one, body in files.items()]
        told = {"id": name, "modelId": name, "sha": SHA, "siblings": siblings}
        return 200, {"Content-Type": "application/json"}, json.dumps(told).encode()
    body = files.get("/".join(rest[2:]))
    if body is None:
        return refused(404, "EntryNotFound")
    etag = hashlib.sha256(body).hexdigest()
    return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": SHA}, body


def refused(status: int, code: str) -> tuple[int, dict[str, str], bytes]:
    return status, {"X-Error-Code": code}, b""
