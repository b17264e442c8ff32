"""Check a series: its form, its mails, and that it applies by every way a person may choose."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from k3patches import tree as trees
from k3patches.base import Base
from k3patches.contracts import contract_file
from k3patches.git import GitError, git
from k3patches.messages import CONTRACT, OWN, PICKED, UPSTREAM_STATUS
from k3patches.refresh import export
from k3patches.series import Patch, select
from k3patches.source import Source

SUBJECT = re.compile(r"(\[[A-Z][A-Za-z0-9 /-]*\])+ \S.{7,}")
TRAILERS = (*OWN, "Signed-off-by", "Co-authored-by", "Fixes")
STATUS = re.compile(r"(Pending|Submitted|Backport|Inappropriate) \[\S.*\]")
SPDX = ("SPDX-License-Identifier: Apache-2.0", "SPDX-FileCopyrightText: Copyright contributors to the vLLM project")
SUBJECT_LIMIT = 72
BODY_WIDTH = 72
MAIL_MAGIC = "From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001"


@dataclass(frozen=True)
class Bench:
    """What the checks work on; ``commits`` are the patches' commits in ``tree``, in order."""

    base: Base
    patches: Sequence[Patch]
    tree: Path
    commits: Sequence[str]
    contracts: Path


class Skipped(Exception):
    """A check whose tool is not installed; ``str()`` names the tool."""


Check = Callable[[Bench], Iterator[str]]


def _print(line: str) -> None:
    click.echo(line, err=True)


def lint(
    base: Base,
    source: Source,
    patches: Sequence[Patch],
    contracts: Path,
    scratch: Path,
    echo: Callable[[str], None] = _print,
) -> bool:
    """Run all checks on a series, print a line for each check and finding, and say whether it is clean.

    ``contracts`` is the folder of contract files, ``scratch`` a folder that may be written to.
    """
    select(list(patches))
    findings = 0
    prefix = f".lint-{base.release}-"
    for stale in scratch.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=scratch) as folder:
        tree = Path(folder).resolve() / "tree"
        pristine = scratch / f"v{base.release}" / "pristine"
        trees.apply(base, source, [], pristine)
        git("clone", "-q", "--shared", pristine.resolve(), tree, cwd=scratch)
        commits = []
        for patch in patches:
            trees.apply_one(tree, patch)
            commits.append(git("rev-parse", "HEAD", cwd=tree).strip())
        bench = Bench(base, patches, tree, commits, contracts)
        for check in CHECKS:
            name = check.__name__.lstrip("_").replace("_", " ")
            try:
                found = list(check(bench))
            except Skipped as e:
                echo(f"  {name}: SKIPPED, {e} is not installed")
                continue
            echo(f"  {name}: {f'{len(found)} findings' if found else 'ok'}")
            for finding in found:
                echo(f"    {finding}")
            findings += len(found)
    return findings == 0


def _numbering(bench: Bench) -> Iterator[str]:
    for place, patch in enumerate(bench.patches, 1):
        if patch.number != f"{place:04d}":
            yield f"{patch.name} stands at place {place}: number the series 0001, 0002, .. in its order"


def _headers(bench: Bench) -> Iterator[str]:
    for patch in bench.patches:
        if not patch.data.startswith(MAIL_MAGIC.encode()):
            yield f"{patch.name}: the first line is not {MAIL_MAGIC!r}"
        if not SUBJECT.fullmatch(patch.subject):
            yield f"{patch.name}: subject {patch.subject!r} is not in vLLM's style, [Bugfix] What it does"
        if len(patch.subject) > SUBJECT_LIMIT:
            yield f"{patch.name}: the subject has {len(patch.subject)} characters, {SUBJECT_LIMIT} are the limit"
        paragraphs = [p for p in patch.body.strip().split("\n\n") if p]
        if len(paragraphs) < 3:
            yield f"{patch.name}: say what was wrong, what the user saw, what is done, in paragraphs of the body"
        for line in patch.body.splitlines():
            if len(line) > BODY_WIDTH and " " in line.strip() and not re.match(r"[A-Z][A-Za-z-]+: ", line):
                yield f"{patch.name}: a line of the body is longer than {BODY_WIDTH}: {line!r}"


def _trailers(bench: Bench) -> Iterator[str]:
    for patch in bench.patches:
        if not patch.contracts:
            yield f"{patch.name}: no {CONTRACT} trailer names the fix it is for"
        for fix in patch.contracts:
            if not (bench.contracts / contract_file(fix)).is_file():
                yield f"{patch.name}: {CONTRACT} {fix} has no {contract_file(fix)} in {bench.contracts.name}/"
        statuses = patch.message.values(UPSTREAM_STATUS)
        if len(statuses) != 1 or not STATUS.fullmatch(statuses[0]):
            yield f"{patch.name}: one {UPSTREAM_STATUS} is wanted: Pending, Submitted, Backport or Inappropriate [why]"
        if patch.author not in patch.message.values("Signed-off-by"):
            yield f"{patch.name}: no Signed-off-by of its author, {patch.author}"
        for trailer in patch.message.trailers:
            if trailer.key and trailer.key not in TRAILERS:
                yield f"{patch.name}: unknown trailer {trailer.key}"
            elif not trailer.key and not trailer.text.startswith(PICKED):
                yield f"{patch.name}: {trailer.text!r} stands among the trailers and is none"
        if str(patch.message) != f"{patch.subject}\n\n{patch.body.rstrip()}\n":
            yield f"{patch.name}: leave one empty line between text and trailers, and none after them"


def _scope(bench: Bench) -> Iterator[str]:
    for patch in bench.patches:
        for path in patch.files:
            if not path.startswith("tests/") and Path(path).name not in f"{patch.subject}\n{patch.body}":
                yield f"{patch.name}: changes {path}, which its message does not name"
        if not any(path.startswith("tests/") for path in patch.files):
            yield f"{patch.name}: carries no test under tests/"


def _whitespace(bench: Bench) -> Iterator[str]:
    for patch, commit in zip(bench.patches, bench.commits, strict=True):
        try:
            git("diff-tree", "--check", f"{commit}^", commit, cwd=bench.tree)
        except GitError as e:
            yield f"{patch.name}: {str(e).splitlines()[0]}"


def _spdx(bench: Bench) -> Iterator[str]:
    for patch in bench.patches:
        for file in patch.diff:
            if file.is_added_file and file.path.endswith(".py"):
                head = "".join(line.value for line in file[0])[:400]
                for line in SPDX:
                    if line not in head:
                        yield f"{patch.name}: new file {file.path} lacks the line {line!r}"


def _canonical_form(bench: Bench) -> Iterator[str]:
    for patch, commit in zip(bench.patches, bench.commits, strict=True):
        if export(bench.tree, commit) != patch.data:
            yield f"{patch.name}: differs from the export of its own commit (edited by hand?)"


def _each_prefix_compiles(bench: Bench) -> Iterator[str]:
    for patch, commit in zip(bench.patches, bench.commits, strict=True):
        for path in git(
            "diff-tree", "-r", "--name-only", "--diff-filter=d", f"{commit}^", commit, cwd=bench.tree
        ).split():
            if path.endswith(".py"):
                try:
                    compile(git("show", f"{commit}:{path}", cwd=bench.tree), path, "exec", dont_inherit=True)
                except (SyntaxError, ValueError) as e:
                    yield f"{patch.name}: {path} does not compile: {e}"


def _upstream_format(bench: Bench) -> Iterator[str]:
    python = sorted({f for p in bench.patches for f in p.files if f.endswith(".py") and (bench.tree / f).is_file()})
    for told in unformatted(bench.tree, python):
        yield f"ruff {told}"


def unformatted(tree: Path, python: Sequence[str]) -> Iterator[str]:
    """What ruff, with the tree's configuration, says against the files ``python``."""
    ruff = _tool("ruff")
    if not python:
        return
    for arguments in (["check", "--quiet"], ["format", "--check", "--quiet"]):
        command = [ruff, *arguments, "--no-cache", *python]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
        if done.returncode:
            told = (done.stdout + done.stderr).strip().splitlines()
            yield f"{arguments[0]} with the tree's configuration: {'; '.join(told[:3])}"


def _applies_with_patch(bench: Bench) -> Iterator[str]:
    tool = _tool("patch")
    with _touched_files(bench) as folder:
        for patch in bench.patches:
            command = [tool, "-p1", "--fuzz=0", "--batch", "-i", str(patch.path.resolve())]
            yield from _run(patch.name, command, folder, dict(os.environ))
        yield from _differences("patch -p1", bench, folder)


def _applies_with_quilt(bench: Bench) -> Iterator[str]:
    tool = _tool("quilt")
    if not bench.patches:
        return
    with _touched_files(bench) as folder:
        env = os.environ | {"QUILT_PATCHES": str(bench.patches[0].path.parent.resolve()), "QUILT_PC": ".pc"}
        yield from _run("quilt push -a", [tool, "--quiltrc=-", "push", "-a", "--fuzz=0"], folder, env)
        yield from _differences("quilt push -a", bench, folder)


CHECKS: list[Check] = [
    _numbering,
    _headers,
    _trailers,
    _scope,
    _whitespace,
    _spdx,
    _canonical_form,
    _each_prefix_compiles,
    _upstream_format,
    _applies_with_patch,
    _applies_with_quilt,
]


def _tool(name: str) -> str:
    # A virtual environment's own tools count also where it is not activated.
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.is_file() else shutil.which(name)
    if not found:
        raise Skipped(name)
    return found


@contextmanager
def _touched_files(bench: Bench) -> Iterator[Path]:
    """A folder with the pristine text of every file that the series touches."""
    with tempfile.TemporaryDirectory(prefix=".files-", dir=bench.tree.parent) as folder:
        present = trees.pristine_blobs(bench.tree, ".")
        names = sorted({f for p in bench.patches for f in p.files if f in present})
        if names:
            git("--work-tree", folder, "checkout", "-q", "-f", trees.PRISTINE_TAG, "--", *names, cwd=bench.tree)
            # That checkout also moved the index; HEAD's is the one that the other checks expect.
            git("reset", "-q", cwd=bench.tree)
        yield Path(folder)


def _run(name: str, command: list[str], folder: Path, env: dict[str, str]) -> Iterator[str]:
    done = subprocess.run(command, cwd=folder, env=env | {"LC_ALL": "C"}, capture_output=True, text=True, check=False)
    told = done.stdout + done.stderr
    if done.returncode:
        yield f"{name}: {command[0]} fails: {told.strip().splitlines()[-1]}"
    for line in told.splitlines():
        if re.search(r"offset|fuzz \d", line):
            yield f"{name}: {line.strip()}"


def _differences(way: str, bench: Bench, folder: Path) -> Iterator[str]:
    for change in trees.changes(bench.tree):
        path = folder / change.path
        if (path.read_bytes() if path.is_file() else None) != change.content:
            yield f"{way} and git am give different {change.path}"
