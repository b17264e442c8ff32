"""Broken checkpoints given to `vllm serve`: each must end it, soon, with an error that names what is wrong."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from engine.server import serving

# The first line that says so: reading the weights has begun.
_LOADING = re.compile(rb"Starting to load model|Loading weights|Loading safetensors")
_ERROR = re.compile(r"(?:\w+\.)*(\w*(?:Error|Exception|Interrupt)): (.+)")
# What vLLM logs at another level tells of errors that may come, as of a limit of open files.
_NO_ERROR = re.compile(r"^(?:\([^)]*\) )?(?:DEBUG|INFO|WARNING) .*$", re.MULTILINE)
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


def give(python: str, arguments: dict[str, Any], gpus: list[int], log: Path, limit: float) -> dict[str, Any]:
    """What became of a server that was given a broken checkpoint.

    ``answers``: it came up in spite of it.  ``ended_s``: seconds from its start to its end, of which ``loading_s`` from
    the moment when it began to load.  ``error``: the first error in its log that is no mere report of another process.
    """
    start = time.monotonic()
    loading = None
    with serving(python, arguments, gpus, log) as server:
        answers = None
        while answers is None and time.monotonic() - start < limit:
            if loading is None and _LOADING.search(log.read_bytes()):
                loading = time.monotonic()
            try:
                answers = server.wait(1)
            except TimeoutError:
                continue
        ended = time.monotonic()
    made: dict[str, Any] = {"answers": answers, "hangs": answers is None}
    if answers is False:
        made |= {
            "ended_s": round(ended - start, 1),
            "loading_s": round(ended - loading, 1) if loading else None,
            "exit_code": server.process.returncode,
            "error": first_error(log.read_text(errors="replace")),
        }
    return made


def first_error(text: str) -> str | None:
    """The first error of a log that says more than that something failed elsewhere."""
    for match in _ERROR.finditer(_NO_ERROR.sub("", _COLOR.sub("", text))):
        if "See root cause" not in match[2] and "initialization failed" not in match[2]:
            return f"{match[1]}: {match[2]}"[:600]
    return None
