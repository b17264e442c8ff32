"""Engines side by side, as many on a GPU as its memory is shared by."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Gpus:
    """GPUs by their numbers, each with room for ``jobs`` engines at a time."""

    numbers: Sequence[int]
    jobs: int
    _free: dict[int, int] = field(init=False)
    _changed: threading.Condition = field(init=False, default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self._free = dict.fromkeys(self.numbers, self.jobs)

    def take(self, count: int) -> list[int]:
        """Wait for room on ``count`` GPUs, the emptiest first."""
        with self._changed:
            while True:
                roomy = sorted((gpu for gpu, free in self._free.items() if free), key=lambda gpu: -self._free[gpu])
                if len(roomy) >= count:
                    for gpu in roomy[:count]:
                        self._free[gpu] -= 1
                    return roomy[:count]
                self._changed.wait()

    def give(self, taken: Sequence[int]) -> None:
        with self._changed:
            for gpu in taken:
                self._free[gpu] += 1
            self._changed.notify_all()

    def each(self, tasks: Sequence[tuple[int, Callable[[list[int]], None]]]) -> None:
        """Run every task (how many GPUs, what to do with them), in this order as far as there is room."""

        def work(task: tuple[int, Callable[[list[int]], None]], gpus: list[int]) -> None:
            try:
                task[1](gpus)
            finally:
                self.give(gpus)

        with ThreadPoolExecutor(max_workers=max(1, len(self.numbers) * self.jobs)) as executor:
            futures = []
            for task in tasks:
                futures.append(executor.submit(work, task, self.take(task[0])))
            for future in futures:
                future.result()


def run(command: Sequence[str], log: Path, gpus: Sequence[int], limit: float, **environment: str) -> int | None:
    """The exit code of a command on these GPUs, its output in ``log``; None if it had to be ended after ``limit`` s."""
    with log.open("wb") as output:
        process = start(command, output, gpus, **environment)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end(process)


def start(command: Sequence[str], output: object, gpus: Sequence[int], **environment: str) -> subprocess.Popen[bytes]:
    """A process group of its own, since an engine has processes of its own."""
    return subprocess.Popen(
        list(command),
        stdout=output,  # type: ignore[call-overload]
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} | environment,
    )


def end(process: subprocess.Popen[bytes], patience: float = 10) -> None:
    """End the process and all that it started."""
    for kind, wait in ((signal.SIGTERM, patience), (signal.SIGKILL, patience)):
        try:
            os.killpg(process.pid, kind)
        except ProcessLookupError:
            break
        until = time.monotonic() + wait
        while time.monotonic() < until:
            process.poll()
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.1)
    process.wait()
