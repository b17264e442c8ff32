"""What a rebase tells, for a person (Markdown) and for a program (JSON)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from k3patches import messages, refresh, series
from k3patches.rebase.carry import Conflict
from k3patches.rebase.errors import Result
from k3patches.rebase.gitwork import Commit
from k3patches.rebase.plan import Candidate

MARKDOWN, JSON = "report.md", "report.json"
HOW = {
    "clean": "carried clean",
    "resolution": "by the recorded resolution",
    "person": "edited by hand",
    "new": "new on this base",
}


@dataclass
class Fix:
    """A row of the table: the contract's outcome on both trees, the state, and since when it needs no patch.

    ``told`` is what pytest says of a contract that does not hold.
    """

    fix: str
    pristine: str
    state: str
    patched: str = ""
    since: str = ""
    told: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Moved:
    """A file of a patch: where it is now, if elsewhere, and by how many lines each hunk moved.

    ``offsets`` is None where the patch changes the file in other places than before.
    """

    path: str
    now: str
    offsets: list[int] | None


@dataclass
class Carried:
    """A patch of the new series."""

    key: str
    fixes: list[str]
    subject: str
    source: str
    how: str
    moved: list[Moved]

    @classmethod
    def of(
        cls,
        tree: Path,
        scratch: Path,
        commit: Commit,
        key: str,
        fixes: list[str],
        candidate: Candidate | None,
        how: str,
    ) -> Carried:
        source = f"{candidate.patch.name} of vLLM {candidate.release}" if candidate else ""
        moved = _moved(tree, scratch, commit, candidate) if candidate else []
        return cls(key, fixes, messages.subject(commit.message), source, how, moved)


@dataclass
class Report:
    """All of it; ``dropped`` maps a fix to (patch, its base, why), ``pending`` to the patch that is still to come."""

    target: str
    source: str = ""
    result: Result | None = None
    why: str = ""
    where: str = ""
    fixes: list[Fix] = field(default_factory=list)
    carried: list[Carried] = field(default_factory=list)
    pending: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    conflicts: dict[str, list[Conflict]] = field(default_factory=dict)
    seconds: list[tuple[str, float]] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        (folder / MARKDOWN).write_text("\n".join(self._markdown()) + "\n", encoding="utf-8")
        (folder / JSON).write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")

    def as_json(self) -> dict[str, object]:
        raw = asdict(self)
        raw["result"] = None if self.result is None else str(self.result)
        raw["exit_code"] = None if self.result is None else int(self.result)
        raw["dropped"] = [
            {"fix": fix, "patch": patch, "base": base, "why": why} for fix, (patch, base, why) in self.dropped.items()
        ]
        raw["conflicts"] = [
            {"patch": key, "path": c.path, "how": c.how, "hunks": [{"line": n, "text": t} for n, t in c.hunks]}
            for key, found in self.conflicts.items()
            for c in found
        ]
        raw["seconds"] = [{"step": name, "seconds": spent} for name, spent in self.seconds]
        raw["schema"] = 1
        return raw

    def _markdown(self) -> Iterator[str]:
        yield f"# {self.target}: {self.result if self.result is not None else 'not finished'}"
        if self.why:
            yield from ("", self.why)
        if self.source:
            yield from ("", f"Carried from {self.source}" + (f" into `{self.where}`." if self.where else "."))
        if self.fixes:
            yield from ("", "## Fixes", "", "| fix | state | pristine | with the series |", "|---|---|---|---|")
            for fix in self.fixes:
                state = f"{fix.state} since {fix.since}" if fix.since else fix.state
                yield f"| `{fix.fix}` | {state} | {fix.pristine} | {fix.patched} |"
            for told in (told for fix in self.fixes for told in fix.told):
                yield from ("", f"- {told}")
        if self.carried or self.dropped or self.pending:
            yield from ("", "## Patches", "")
            for patch in self.carried:
                source = f" ({patch.source})" if patch.source else ""
                yield f"- `{patch.key}`: {HOW[patch.how]}{source}: {patch.subject}"
                yield from (f"  - {line}" for line in _told(patch.moved))
            for key, (name, base, why) in self.dropped.items():
                yield f"- `{key}`: dropped, {why} ({name} of vLLM {base})"
            for key, name in self.pending.items():
                yield f"- `{key}`: {'in conflict' if key in self.conflicts else 'not carried yet'} ({name})"
        for key, found in self.conflicts.items():
            yield from ("", f"## `{key}` in conflict")
            for conflict in found:
                yield from ("", f"### {conflict.path}", "", f"{conflict.how[:1].upper()}{conflict.how[1:]}.")
                for line, text in conflict.hunks:
                    yield from ("", f"Line {line}:", "", "~~~~diff", text, "~~~~")
        if self.seconds:
            yield from ("", "## Time", "", "| step | s |", "|---|---|")
            yield from (f"| {name} | {spent} |" for name, spent in self.seconds)
            yield f"| all | {sum(spent for _, spent in self.seconds):.1f} |"


def _told(moved: list[Moved]) -> Iterator[str]:
    for file in moved:
        if file.now != file.path:
            yield f"`{file.path}` is `{file.now}` now" if file.now else f"`{file.path}` is not touched any more"
        if file.offsets is None:
            yield f"`{file.now or file.path}` is changed in other places than before"
        elif any(file.offsets):
            yield f"`{file.now}` moved by {', '.join(f'{n:+d}' for n in file.offsets)} lines"


def _moved(tree: Path, scratch: Path, commit: Commit, candidate: Candidate) -> list[Moved]:
    """What moved between a patch and its carried self."""
    draft = scratch / "draft.patch"
    draft.write_bytes(refresh.export(tree, commit.id))
    new = {file.path: file for file in series.read(draft).diff}
    draft.unlink()
    old = {file.path: file for file in candidate.patch.diff}
    left = [path for path in new if path not in old]
    found = []
    for path, file in old.items():
        now = path if path in new else ""
        if not now:
            # The same name elsewhere, or the only file that is not accounted for.
            named = [p for p in left if Path(p).name == Path(path).name] or (left if len(left) == 1 else [])
            now = named[0] if named else ""
        if not now:
            found.append(Moved(path, "", []))
            continue
        before, after = [h.source_start for h in file], [h.source_start for h in new[now]]
        same = len(before) == len(after)
        offsets = [b - a for a, b in zip(before, after, strict=True)] if same else None
        if now != path or offsets is None or any(offsets):
            found.append(Moved(path, now, offsets))
    return found
