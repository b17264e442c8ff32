"""Start a fix: an edit with its patch begun, its contract, and its place in what is known of upstream."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from k3patches import base as bases
from k3patches import contracts, files, lint, series
from k3patches.errors import UserError
from k3patches.git import GitError, git, git_as_user
from k3patches.pr import known
from k3patches.project import Project
from k3patches.rebase import gitwork
from k3patches.work import opening, templates
from k3patches.work.place import Place, State

FIX = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)+")
NAME, ADDRESS, DATE = range(3)


def start(place: Place, fix: str, subject: str, test: str | None) -> tuple[Path, str]:
    """Open an edit for the new fix ``fix``, and return its contract and its test in the tree."""
    name = fix.replace("-", "_")
    test = test or f"tests/test_{name}.py"
    _check(place.project, fix, subject, test)
    opening.require_none(place)
    author = _author(place.project.root)
    contract = place.contracts / contracts.contract_file(fix)

    def begin(tree: Path, state: State) -> None:
        state.patch, state.fix = f"{len(state.series) + 1:04d}-{fix}.patch", fix
        path = tree / test
        if path.exists():
            raise UserError(f"{test} exists in vLLM {place.release}: name a new file with --test")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(templates.TEST_FILE.format(name=name))
        git("add", "-f", test, cwd=tree)
        by = f"{author[NAME]} <{author[ADDRESS]}>"
        message = templates.MESSAGE.format(subject=subject, fix=fix, author=by)
        content = git("write-tree", cwd=tree).strip()
        git("reset", "-q", "--hard", gitwork.write_commit(tree, content, "HEAD", message, author), cwd=tree)
        # Before the edit is there, which could not be written back without; a contract alone may be started again.
        if not contract.exists():
            files.write(contract, templates.CONTRACT_FILE.format(fix=fix))
        _make_known(place.project, fix)

    opening.at_end(place, begin)
    return contract, test


def forget(place: Place, fix: str) -> Path | None:
    """Take back what was begun of a fix outside its edit; a contract that somebody wrote stays, and is returned."""
    contract = place.contracts / contracts.contract_file(fix)
    if contract.is_file():
        if contract.read_text() != templates.CONTRACT_FILE.format(fix=fix):
            return contract
        contract.unlink()
    path, table = _known(place.project), templates.KNOWN.format(fix=fix)
    if path.is_file() and (text := path.read_text(encoding="utf-8")).endswith(table):
        files.write(path, text.removesuffix(table))
    return None


def _check(project: Project, fix: str, subject: str, test: str) -> None:
    if not FIX.fullmatch(fix):
        raise UserError(f"{fix!r} is no fix's id: small letters and digits in words with a hyphen between, lost-scale")
    contract = project.root / "tests" / "contracts" / contracts.contract_file(fix)
    if contract.exists() and contract.read_text() != templates.CONTRACT_FILE.format(fix=fix):
        raise UserError(f"{fix} is a known fix, with {contract.name}: an id is never used again, choose another")
    for release in project.releases:
        folder = project.series_dir(release)
        base = bases.load(folder)
        named = {i for patch in series.load(folder) for i in patch.contracts}
        if fix in named.union(base.native, base.absent):
            raise UserError(f"{fix} is a known fix, on vLLM {release}: an id is never used again, choose another")
    if not lint.SUBJECT.fullmatch(subject) or len(subject) > lint.SUBJECT_LIMIT:
        raise UserError(
            f"subject {subject!r} is not in vLLM's style, [Bugfix] What it does, of at most {lint.SUBJECT_LIMIT} "
            f"characters"
        )
    parts = PurePosixPath(test).parts
    if parts[:1] != ("tests",) or ".." in parts or not re.fullmatch(r"test_\w+\.py", parts[-1]):
        raise UserError(f"--test {test} is no test module of upstream's: give tests/.../test_NAME.py")


def _author(checkout: Path) -> tuple[str, str, str]:
    """Name, address and date, as git has them for a commit in the checkout."""
    try:
        ident = git_as_user("var", "GIT_AUTHOR_IDENT", cwd=checkout).strip()
    except GitError:
        ident = ""
    match = re.fullmatch(r"(.+) <(.+)> (\d+ [+-]\d{4})", ident)
    if not match:
        raise UserError(
            "git does not know who signs the patch off: git config --global user.name NAME, and user.email likewise"
        )
    return match[1], match[2], match[3]


def _known(project: Project) -> Path:
    return project.root / "patches" / "pr" / known.FILE


def _make_known(project: Project, fix: str) -> None:
    path = _known(project)
    if fix not in known.load(path.parent) and path.is_file():
        files.write(path, path.read_text(encoding="utf-8") + templates.KNOWN.format(fix=fix))
