"""vLLM's repository on this machine: its releases as tags, built from the sdists, and a main with made-up changes.

The changes are derived from a patch, whichever that is, and from the release's source, so that they go along when
another base becomes the newest.
"""

from __future__ import annotations

import ast
import subprocess
import tarfile
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from k3patches.series import Patch
from miniature import git

# What an sdist has that the repository has not.
GENERATED = ("PKG-INFO", "setup.cfg", "vllm/_version.py")
# What upstream writes where the patch changes lines.
OTHER_LINE = "# Upstream has something else to say here."
Functions = dict[str, ast.FunctionDef]
Texts = dict[str, str]


def repository(folder: Path, sdists: Sequence[tuple[str, Path]]) -> Path:
    """A repository of one commit a release, oldest first, each tagged vX.Y.Z, and main on the last."""
    folder.mkdir(parents=True)
    git(folder, "init", "-q", ".")
    git(folder, "config", "core.compression", "1")
    with subprocess.Popen(["git", "fast-import", "--quiet"], cwd=folder, stdin=subprocess.PIPE) as importer:
        assert importer.stdin is not None
        for release, sdist in sdists:
            for piece in _stream(release, sdist):
                importer.stdin.write(piece)
    assert importer.returncode == 0
    git(folder, "reset", "-q", "--hard", "main")
    return folder


def _stream(release: str, sdist: Path) -> Iterator[bytes]:
    message = f"vLLM {release}".encode()
    yield b"commit refs/heads/main\ncommitter vLLM <vllm@upstream.example> 1786000000 +0000\n"
    yield b"data %d\n%s\ndeleteall\n" % (len(message), message)
    with tarfile.open(sdist) as archive:
        for member in archive:
            name = member.name.partition("/")[2]
            if member.isfile() and name not in GENERATED and ".egg-info/" not in name:
                content = archive.extractfile(member)
                assert content is not None
                mode = "100755" if member.mode & 0o100 else "100644"
                yield f"M {mode} inline {name}\ndata {member.size}\n".encode() + content.read() + b"\n"
    yield f"\nreset refs/tags/v{release}\nfrom refs/heads/main\n\n".encode()


class Change:
    """A change to a release, aimed at what a patch does; each method makes main such a commit on top."""

    def __init__(self, tree: Path, tag: str, patches: Sequence[Patch]) -> None:
        self.tree, self.tag = tree, tag
        self.reset()
        # The first patch that stands alone, and that changes a function.
        found = filter(None, (self._aim(patch) for patch in patches if not patch.depends_on))
        self.patch, self.before, self.after, self.changed = next(found)
        self.fix = self.patch.contracts[0]
        # The file that is moved from, and conflicts.
        self.path = next(iter(self.changed))

    def _aim(self, patch: Patch) -> tuple[Patch, Texts, Texts, dict[str, list[str]]] | None:
        files = [f.path for f in patch.diff if f.path.startswith("vllm/") and f.path.endswith(".py")]
        before = {path: (self.tree / path).read_text() for path in files if (self.tree / path).is_file()}
        try:
            git(self.tree, "apply", "--include=vllm/*", str(patch.path))
        except subprocess.CalledProcessError:
            return None
        after = {path: (self.tree / path).read_text() for path in files if (self.tree / path).is_file()}
        self.reset()
        both = [path for path in before if path in after]
        changed = {path: names for path in both if (names := _changed(before[path], after[path]))}
        return (patch, before, after, changed) if changed else None

    def fixed_another_way(self) -> str:
        """Upstream has fixed it: what the patch touches is worded differently in every line, and does the same."""
        for path, text in self.after.items():
            old, new = _functions(self.before.get(path, "")), _functions(text)
            touched = [n for n in new if n not in old or ast.dump(new[n]) != ast.dump(old[n])]
            (self.tree / path).parent.mkdir(parents=True, exist_ok=True)
            (self.tree / path).write_text(_reworded(text, [new[name] for name in touched]))
        return self._commit("Fix it another way")

    def moved(self) -> str:
        """What holds the patched function goes to a file of its own, and is imported from there."""
        text = self.before[self.path]
        name = self.changed[self.path][0].split(".")[0]
        node = next(
            n for n in ast.parse(text).body if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and n.name == name
        )
        start, end = _span(node)
        lines = text.splitlines(keepends=True)
        module = self.path.removesuffix(".py").replace("/", ".")
        there = Path(self.path).with_name(f"{Path(self.path).stem}_moved.py")
        (self.tree / there).write_text(
            f"import sys\n\nglobals().update(vars(sys.modules[{module!r}]))\n\n\n{''.join(lines[start:end])}"
        )
        lines[start:end] = [f"from {module}_moved import {name}  # noqa: E402\n"]
        (self.tree / self.path).write_text("".join(lines))
        return self._commit("Move it to another file")

    def undone_elsewhere(self) -> str:
        """What a file defines last takes the patched functions' place, as they are without the patch."""
        for path, names in self.changed.items():
            text = self.before[path]
            functions = _functions(text)
            parts = [text]
            for name in names:
                owner, _, own = name.rpartition(".")
                source = _source(text, functions[name]).replace("super()", f"super({owner or 'object'}, self)")
                again = f"_again_{own}"
                parts.append(f"\n\n{source.replace(f'def {own}(', f'def {again}(', 1)}\n\n{name} = {again}\n")
            (self.tree / path).write_text("".join(parts))
        return self._commit("Define it once more at the end")

    def conflicting(self) -> str:
        """Where the patch changes lines, upstream has written one more."""
        old, new = (texts[self.path].splitlines(keepends=True) for texts in (self.before, self.after))
        place = next(i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
        old.insert(place, f"{OTHER_LINE}\n")
        (self.tree / self.path).write_text("".join(old))
        return self._commit("Write something else there")

    def reset(self) -> None:
        """Make main the release again."""
        git(self.tree, "reset", "-q", "--hard", self.tag)
        git(self.tree, "clean", "-q", "-f", "-d")

    def _commit(self, subject: str) -> str:
        """Make main this commit."""
        git(self.tree, "add", "-A")
        git(self.tree, "commit", "-q", "-m", subject)
        return git(self.tree, "rev-parse", "HEAD").strip()


def _functions(text: str) -> Functions:
    """Top-level functions and methods by their dotted name."""
    found: Functions = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{n.name}": n for n in node.body if isinstance(n, ast.FunctionDef)}
    return found


def _changed(before: str, after: str) -> list[str]:
    """The functions of ``before`` that ``after`` has otherwise."""
    old, new = _functions(before), _functions(after)
    return [name for name in old if name in new and ast.dump(old[name]) != ast.dump(new[name])]


def _span(node: ast.FunctionDef | ast.ClassDef) -> tuple[int, int]:
    """The lines of a definition with its decorators, as a slice."""
    assert node.end_lineno is not None
    return min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1, node.end_lineno


def _source(text: str, node: ast.FunctionDef) -> str:
    start, end = _span(node)
    return textwrap.dedent("".join(text.splitlines(keepends=True)[start:end]))


def _reworded(text: str, nodes: Sequence[ast.FunctionDef]) -> str:
    """``text`` with these functions as Python itself would write them down."""
    lines = text.splitlines(keepends=True)
    for node in sorted(nodes, key=lambda n: -n.lineno):
        start, end = _span(node)
        lines[start:end] = [textwrap.indent(ast.unparse(node), " " * node.col_offset) + "\n"]
    return "".join(lines)
