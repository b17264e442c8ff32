"""`vllm serve` as a process, and its client."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import pool

NAME = "tiny-k3"


@dataclass(frozen=True)
class Server:
    """A server that is being started or runs."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait(self, limit: float) -> bool:
        """Until it answers: True; False if it ended by itself; TimeoutError after ``limit`` seconds."""
        until = time.monotonic() + limit
        while time.monotonic() < until:
            if self.process.poll() is not None:
                return False
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                if answer.status == 200:
                    return True
            time.sleep(0.5)
        raise TimeoutError(f"no answer from {self.url} within {limit:.0f} s")

    def call(self, method: str, **arguments: Any) -> None:
        """A method on every worker; needs the server's development mode."""
        body = json.dumps({"method": method, "kwargs": arguments, "timeout": 120}).encode()
        request = urllib.request.Request(
            f"{self.url}/collective_rpc", data=body, headers={"Content-Type": "application/json"}
        )
        try:
            urllib.request.urlopen(request, timeout=150).read()
        except urllib.error.HTTPError as e:
            raise RuntimeError(f"{method}: {e.code} {e.read().decode(errors='replace')[:500]}") from None


@contextlib.contextmanager
def serving(
    python: str, arguments: dict[str, Any], gpus: Sequence[int], log: Path, **environment: str
) -> Iterator[Server]:
    """`vllm serve` with ``vllm.LLM``'s keyword arguments; it and all its processes are ended at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.cli.main", "serve", arguments["model"]]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", NAME]
    for name, value in arguments.items():
        option = "--" + name.replace("_", "-")
        if name == "model" or value is None or value is False:
            continue
        command += [option] if value is True else [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    with log.open("wb") as output:
        process = pool.start(command, output, gpus, VLLM_SERVER_DEV_MODE="1", **environment)
        try:
            yield Server(process, port, log)
        finally:
            pool.end(process)
