"""Which of upstream's tests touch what a series changes: found in their text, with no list kept by hand."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath

TESTS = "tests"
PACKAGE = "vllm"
# What a module name can go on with, in the text of a test.
WORD = r"[\w.]"


def modules(changed: Iterable[str]) -> set[str]:
    """The modules, by dotted name, of those of the ``changed`` files that are Python of vLLM's."""
    paths = (PurePosixPath(name) for name in changed)
    return {_module(path) for path in paths if path.suffix == ".py" and path.parts[0] == PACKAGE}


def tests(tree: Path, changed: Collection[str]) -> list[str]:
    """The test files of ``tree``, by path, that are themselves ``changed``, or import or name a module that is."""
    wanted = modules(changed)
    text = re.compile("|".join(_spellings(wanted)) or r"(?!)")
    names = []
    for path in sorted((tree / TESTS).rglob("test_*.py")):
        name = path.relative_to(tree).as_posix()
        if name in changed or _touches(path.read_text(encoding="utf-8", errors="replace"), wanted, text):
            names.append(name)
    return names


def _touches(source: str, wanted: Collection[str], text: re.Pattern[str]) -> bool:
    # Parsing takes long: without any of this in its text, a file has neither.
    parts = {name for module in wanted for name in (module, module.rpartition(".")[0], module.replace(".", "/"))}
    if not any(part in source for part in parts):
        return False
    try:
        with warnings.catch_warnings():
            # Of strings such as "\d" in somebody else's file.
            warnings.simplefilter("ignore")
            parsed = ast.parse(source)
    except (SyntaxError, ValueError):
        # Of a later Python, perhaps; its text may still name a module.
        return text.search(source) is not None
    if any(name in wanted for name in _imported(parsed)):
        return True
    strings = (node.value for node in ast.walk(parsed) if isinstance(node, ast.Constant))
    return any(isinstance(value, str) and text.search(value) for value in strings)


def _imported(parsed: ast.AST) -> Iterator[str]:
    """Every dotted name that an import may mean: in ``from a import b``, ``a.b`` may be a module too."""
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _spellings(wanted: Iterable[str]) -> list[str]:
    """Patterns for a module in a string, as a patch's target or a path: ``a.b`` is in "a.b.C", and not in "a.bc"."""
    dotted = sorted(wanted)
    paths = [name.replace(".", "/") for name in dotted]
    return [rf"(?<!{WORD}){re.escape(name)}(?!\w)" for name in dotted] + [rf"{re.escape(p)}\.py" for p in paths]


def _module(path: PurePosixPath) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
