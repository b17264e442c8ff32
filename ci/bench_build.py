#!/usr/bin/env python3
"""Time a warm build of the patched wheel, beside upstream's own way to reuse compiled files.

    ci/bench_build.py [--upstream-python PYTHON]

The archives must be in the cache (./build.sh fetch).  Upstream's way is VLLM_USE_PRECOMPILED with
the official wheel as VLLM_PRECOMPILED_WHEEL_LOCATION, run by vLLM's setup.py on the same patched
tree; it wants an interpreter with a CUDA build of torch and upstream's build requirements, so it is
measured only where --upstream-python names one.  Prints a Markdown table: wall clock, CPU time, and
the largest process's peak resident memory.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Cost:
    """``wall`` and ``cpu`` in seconds, ``peak`` in MiB."""

    wall: float
    cpu: float
    peak: float


def measure(command: list[str], **variables: str) -> Cost:
    """Run ``command`` in a child of its own, so that its peak is not another's."""
    report, reporter = os.pipe()
    start = time.monotonic()
    pid = os.fork()
    if pid == 0:
        done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, stdout=2, check=False)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        os.write(reporter, f"{used.ru_utime + used.ru_stime} {used.ru_maxrss / 1024}".encode())
        os._exit(done.returncode)
    _, status = os.waitpid(pid, 0)
    wall = time.monotonic() - start
    if status:
        sys.exit(f"Error: {' '.join(command)} failed, see above")
    cpu, peak = map(float, os.read(report, 100).split())
    return Cost(wall, cpu, peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream-python", help="interpreter with torch for CUDA, for upstream's way")
    args = parser.parse_args()
    fetched = subprocess.run(["./build.sh", "fetch"], cwd=ROOT, check=True, capture_output=True, text=True)
    official = fetched.stdout.splitlines()[-1]
    with tempfile.TemporaryDirectory() as out:
        rows = [("./build.sh", measure(["./build.sh", "--out", out]))]
        if args.upstream_python:
            source = ["./build.sh", "wheel", "--from-source", "--no-isolation", "--out", out]
            rows.append(
                (
                    "VLLM_USE_PRECOMPILED",
                    measure(
                        [*source, "--python", args.upstream_python],
                        VLLM_USE_PRECOMPILED="1",
                        VLLM_PRECOMPILED_WHEEL_LOCATION=official,
                    ),
                )
            )
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    print("| way | wall, s | CPU, s | peak memory, MiB |\n|---|---|---|---|")
    for name, cost in rows:
        print(f"| {name} | {cost.wall:.1f} | {cost.cpu:.1f} | {cost.peak:.0f} |")
    if not args.upstream_python:
        print("| VLLM_USE_PRECOMPILED | not measured: no --upstream-python with torch for CUDA | | |")


if __name__ == "__main__":
    main()
