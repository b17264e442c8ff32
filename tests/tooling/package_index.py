"""A package index on this machine that can be told to misbehave."""

from __future__ import annotations

import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from typing_extensions import Self


class PackageIndex:
    """Serve the files of a folder as the project vllm; as a proxy, of whatever host it is asked for.

    ``plans[name]`` says what becomes of the next requests for a file, the last entry of all further ones:
    ``well``, ``cut`` (break off in the middle), ``wrong`` (other bytes), ``missing`` (404), ``stall`` (send
    half, set :attr:`stalled`, and wait).  ``asked`` lists the paths of all requests.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plans: dict[str, list[str]] = defaultdict(lambda: ["well"])
        self.asked: list[str] = []
        self.page_status = 200
        self.page_type = "text/html"
        self.stalled = threading.Event()
        self.go_on = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/simple"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                index.asked.append(self.path)
                # A proxy is asked for whole addresses.
                self.path = urlsplit(self.path).path
                name = self.path.rsplit("/", 1)[-1]
                if self.path == "/simple/vllm/":
                    links = "".join(f'<a href="/moved/{p.name}">{p.name}</a>\n' for p in index.folder.iterdir())
                    page = f"<!DOCTYPE html><html><body>{links}</body></html>".encode()
                    self._send(index.page_status, page, page, {"Content-Type": index.page_type})
                elif self.path.startswith("/moved/"):
                    self._send(302, b"", b"", {"Location": f"/files/{name}"})
                elif self.path.startswith("/files/") and (index.folder / name).is_file():
                    self._file(name)
                else:
                    self._send(404, b"", b"", {})

            def _file(self, name: str) -> None:
                plan = index.plans[name]
                how = plan.pop(0) if len(plan) > 1 else plan[0]
                content = (index.folder / name).read_bytes()
                half = content[: len(content) // 2]
                if how == "missing":
                    self._send(404, b"", b"", {})
                elif how == "cut":
                    self._send(200, half, content, {})
                elif how == "stall":
                    self._send(200, half, content, {})
                    self.wfile.flush()
                    index.stalled.set()
                    index.go_on.wait(30)
                else:
                    content = content[::-1] if how == "wrong" else content
                    self._send(200, content, content, {})

            def _send(self, status: int, sent: bytes, announced: bytes, headers: dict[str, str]) -> None:
                self.send_response(status)
                for header, value in {**headers, "Content-Length": str(len(announced))}.items():
                    self.send_header(header, value)
                self.end_headers()
                self.wfile.write(sent)
                self.close_connection = True

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler
