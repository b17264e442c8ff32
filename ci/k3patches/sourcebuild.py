"""Build the patched tree with vLLM's own setup.py."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import click

from k3patches.errors import UserError
from k3patches.git import git


def build(tree: Path, version: str, into: Path, python: str, isolated: bool) -> Path:
    """Run ``pip wheel`` on a copy of ``tree`` and return the wheel it leaves in ``into``.

    The environment is passed on as it is, so VLLM_TARGET_DEVICE, VLLM_USE_PRECOMPILED, MAX_JOBS and
    the like work as upstream documents them; setup.py adds to ``version`` what it adds to its own
    (``.empty``, ``.cpu``).  ``isolated`` lets pip install the build requirements
    of the tree's pyproject.toml (a torch among them) into an environment of the build's own.
    """
    with tempfile.TemporaryDirectory(prefix=".source-", dir=into) as folder:
        # setup.py leaves files all over the tree it builds, which must not be taken for somebody's edits.
        copy = Path(folder) / "vllm"
        copy.mkdir()
        git("--work-tree", copy, "checkout", "-q", "-f", "HEAD", "--", ".", cwd=tree)
        command = [python, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder]
        command += [str(copy)] if isolated else ["--no-build-isolation", str(copy)]
        env = os.environ | {"SETUPTOOLS_SCM_PRETEND_VERSION": version}
        click.echo(f"building vLLM {version} from source with {python}", err=True)
        try:
            subprocess.run(command, env=env, check=True, stdout=2)
        except FileNotFoundError:
            raise UserError(f"{python} is no Python interpreter: name one with --python") from None
        except subprocess.CalledProcessError as e:
            raise UserError(
                f"vLLM's own build ended with code {e.returncode}, its messages are above: a machine without "
                f"CUDA's compiler needs VLLM_TARGET_DEVICE, or the overlay build"
            ) from None
        built = next(Path(folder).glob("vllm-*.whl"))
        return built.rename(into / built.name)
