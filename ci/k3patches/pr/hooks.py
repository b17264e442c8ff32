"""Run those of upstream's own pre-commit hooks that are Python scripts in its tree."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

FOLDER = Path("tools") / "pre_commit"
# The scripts that judge the files named to them, and which ones those may be.
SCRIPTS = {
    "check_spdx_header.py": "",
    "check_init_lazy_imports.py": "",
    "check_forbidden_imports.py": "",
    "check_torch_cuda.py": "",
    "check_boolean_context_manager.py": "",
    "check_trust_remote_code.py": "vllm/",
    "check_test_tethering.py": "tests/",
}
COLOUR = re.compile(r"\x1b?\[\d+m")


def findings(tree: Path, files: Sequence[str], python: str) -> Iterator[str]:
    """What the scripts that the tree has say against the Python ``files``; ``python`` must have what they import."""
    for script, start in SCRIPTS.items():
        chosen = [file for file in files if file.endswith(".py") and file.startswith(start)]
        if not chosen or not (tree / FOLDER / script).is_file():
            continue
        done = subprocess.run(
            [python, str(FOLDER / script), *chosen], cwd=tree, capture_output=True, text=True, check=False
        )
        if done.returncode:
            lines = [COLOUR.sub("", line).strip() for line in (done.stdout + done.stderr).splitlines()]
            told = [line for line in lines if any(file in line for file in chosen)] or [*lines[-1:], "it failed"][:1]
            yield from (f"{script}: {line}" for line in told)
