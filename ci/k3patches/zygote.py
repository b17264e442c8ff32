"""A process that has third-party modules imported, and forks one for each run of pytest.

multiprocessing's forkserver would do, but for what its children lack of a process of their own: an environment that
modules read at their import, another interpreter than the caller's, and what atexit has to do.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

from k3patches import garbage
from k3patches.errors import UserError


class Pytest(Protocol):
    """:meth:`Zygote.pytest` of one that is idle."""

    def __call__(self, arguments: Sequence[str], output: Path, tree: Path | None = None, /) -> int: ...


class Zygote:
    """Runs pytest with ``python`` and the environment ``env``, once at a time, with ``modules`` imported before."""

    def __init__(self, python: str, modules: Sequence[str], env: Mapping[str, str]) -> None:
        command = [python, "-m", "k3patches.zygote", *modules]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def pytest(self, arguments: Sequence[str], output: Path, tree: Path | None = None) -> int:
        """The exit status, negative for the signal that ended it; what it prints goes to ``output``.

        With ``tree`` it runs there, and imports from there first.
        """
        requests, answers = self.process.stdin, self.process.stdout
        assert requests
        assert answers
        with suppress(BrokenPipeError):
            places = [str(path.resolve()) for path in (tree or Path.cwd(), output)]
            requests.write(json.dumps([*places, tree is not None, *arguments]) + "\n")
            requests.flush()
        if not (answer := answers.readline()):
            raise UserError("the process from which runs of pytest are forked has ended, its own words are above")
        return int(answer)

    def close(self) -> None:
        """Wait for a run that still goes on, and end."""
        self.process.communicate()


@contextmanager
def zygotes(number: int, python: str, modules: Sequence[str], env: Mapping[str, str]) -> Iterator[Pytest]:
    """So many of them, for as many threads."""
    idle: SimpleQueue[Zygote] = SimpleQueue()
    made = [Zygote(python, modules, env) for _ in range(number)]
    for zygote in made:
        idle.put(zygote)

    def pytest(arguments: Sequence[str], output: Path, tree: Path | None = None, /) -> int:
        zygote = idle.get()
        try:
            return zygote.pytest(arguments, output, tree)
        finally:
            idle.put(zygote)

    try:
        yield pytest
    finally:
        for zygote in made:
            zygote.close()


def main() -> None:
    # An interrupt reaches the whole group; the run itself ends by it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    garbage.collect_seldom()
    for module in ("pytest", *sys.argv[1:]):
        # What this interpreter lacks, a run will miss in its own words.
        with suppress(ImportError):
            importlib.import_module(module)
    threads = Path("/proc/self/task")
    if threads.is_dir() and len(list(threads.iterdir())) > 1:
        sys.exit(f"a fork would lose the threads that one of these modules starts: {', '.join(sys.argv[1:])}")
    gc.collect()
    # Pages that the collector does not write to stay shared.
    gc.freeze()
    for request in sys.stdin:
        if not (pid := os.fork()):
            # Ends as any other process does.
            sys.exit(_run(*json.loads(request)))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    os._exit(0)


def _run(folder: str, output: str, first: bool, *arguments: str) -> int:
    import pytest

    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    if first:
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    for name, flags, numbers in (
        (os.devnull, os.O_RDONLY, [0]),
        (output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, [1, 2]),
    ):
        opened = os.open(name, flags)
        for number in numbers:
            os.dup2(opened, number)
        os.close(opened)
    sys.argv = ["pytest", *arguments]
    return pytest.console_main()


if __name__ == "__main__":
    main()
