"""Releases after the miniature's, contracts that are decided in no time, and an index that pins can be asked of."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from k3patches import contracts
from k3patches.contracts import Outcome
from k3patches.errors import UserError
from miniature import RELEASE, SOURCE, TAGS, VERSION_PY, Mini, sdist_bytes

# A contract here is one expression, of the tree's modules: what a function gives for 1, and which modules there are.
CONTRACTS = {
    "alpha-fix": 'call("omega", "alpha", "letters", name="c") == 101',
    "beta-fix": 'there("new")',
    "gamma-fix": 'call("gamma", name="b") == -97',
}
UPLOADED = {"0.28.0": "2026-08-26T10:08:30.560409Z", "0.29.0": "2026-09-09T08:00:00Z", "0.30.0": "2026-09-23T08:00:00Z"}


def later(mini: Mini, release: str, changes: Mapping[str, str | None]) -> dict[str, str]:
    """Publish a release whose source is the miniature's but for ``changes``, and return its source."""
    numbers = tuple(map(int, release.split(".")))
    version = VERSION_PY.replace(RELEASE, release).replace("(0, 27, 1)", str(numbers)).replace("6e448d0ea", "2cf0a6915")
    source: dict[str, str | None] = {**SOURCE, "vllm/_version.py": version, "requirements/cuda.txt": "torch==2.14.0\n"}
    files = {name: text for name, text in (source | dict(changes)).items() if text is not None}
    content = sdist_bytes(files)
    for folder in (mini.files, mini.cache):
        (folder / f"vllm-{release}.tar.gz").write_bytes(content)
    for tag in TAGS.values():
        (mini.files / f"vllm-{release}-{tag}.whl").write_bytes(f"wheel {release} {tag}".encode())
    return files


def write_contracts(mini: Mini, contracts: Mapping[str, str]) -> None:
    """Make these the miniature's contracts."""
    folder = mini.root / "tests" / "contracts"
    for old in folder.glob("test_*.py"):
        old.unlink()
    for fix, text in contracts.items():
        (folder / f"test_{fix.replace('-', '_')}.py").write_text(f"{text}\n")


def run_contracts(folder: Path, chosen: Sequence[str], tree: Path, python: str, **_: Any) -> dict[str, Outcome]:
    """Stands in for ``contracts.run``."""
    return {fix: _outcome((folder / contracts.contract_file(fix)).read_text(), tree) for fix in chosen}


def install() -> None:
    """The same for a process of its own."""
    contracts.run = run_contracts


class NothingRan(Exception):
    """What ``nothing_ran()`` in a contract raises."""


class Absent(Exception):
    """What ``absent()`` in a contract raises."""


def _outcome(text: str, tree: Path) -> Outcome:
    def there(name: str) -> bool:
        return (tree / "vllm" / f"{name}.py").is_file()

    def call(*modules: str, name: str) -> object:
        for module in filter(there, modules):
            namespace: dict[str, Any] = {}
            exec((tree / "vllm" / f"{module}.py").read_text(), namespace)
            if name in namespace:
                return namespace[name](1)
        return None

    def absent() -> bool:
        raise Absent

    def nothing_ran() -> bool:
        raise NothingRan

    def cannot_run() -> bool:
        raise UserError(f"the contracts did not run on {tree}")

    try:
        named = (there, call, absent, nothing_ran, cannot_run)
        holds = eval(text, {function.__name__: function for function in named})
    except NothingRan:
        return Outcome()
    except Absent:
        return Outcome(absent=1)
    except SyntaxError:
        holds = False
    return Outcome(passed=1) if holds else Outcome(failed=1)


class JsonIndex:
    """A package index that serves a folder's files by the simple API's JSON; ``without`` leaves out a key of a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.without = ""
        self.asked = 0
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                index.asked += 1
                name = self.path.rsplit("/", 1)[-1]
                body = index.page() if self.path == "/simple/vllm/" else (index.folder / name).read_bytes()
                self.send_response(200)
                self.send_header("Content-Type", "application/vnd.pypi.simple.v1+json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/simple"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def page(self) -> bytes:
        files = []
        for path in sorted(self.folder.iterdir()):
            release = path.name.removesuffix(".tar.gz").split("-")[1]
            entry: dict[str, object] = {
                "filename": path.name,
                "url": f"/files/{path.name}",
                "hashes": {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()},
                "size": path.stat().st_size,
                "upload-time": UPLOADED.get(release, "2026-08-11T10:59:48Z"),
            }
            if self.without in entry:
                entry[self.without] = {} if self.without == "hashes" else None
            files.append(entry)
        return json.dumps({"meta": {"api-version": "1.1"}, "name": "vllm", "versions": [], "files": files}).encode()


def quickly(mini: Mini, monkeypatch: pytest.MonkeyPatch) -> Iterator[JsonIndex]:
    """What a fixture yields from: contracts of one expression, and an index that knows all releases."""
    write_contracts(mini, CONTRACTS)
    monkeypatch.setattr(contracts, "run", run_contracts)
    index = JsonIndex(mini.files)
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    yield index
    index.close()
