"""The commands in README and CONTRIBUTING exist, with the options that are given to them."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from k3patches import nightly, ship
from k3patches.cli import cli
from miniature import ROOT

TEXTS = (ROOT / "README.md", ROOT / ".github" / "CONTRIBUTING.md")
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.M | re.S)
INLINE = re.compile(r"`([^`]+)`")
SCRIPT = re.compile(r"(?:\./build|ci/[\w-]+)\.(?:sh|py)")
# Scripts that are no command of the package, and the words that they know.
OWN = {"ci/test.sh": {"setup", "contracts"}, "ci/bench_build.py": {"--upstream-python"}}
GROUPS = {"k3patches": cli, "k3patches.nightly": nightly.cli, "k3patches.ship": ship.cli}


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command of this project in code blocks and between backticks, in one paragraph."""
    blocks = "\n".join(BLOCK.findall(text))
    lines = [line for line in blocks.replace("\\\n", " ").splitlines() if line.strip()]
    rest = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    lines += [" ".join(found.split()) for found in INLINE.findall(rest)]
    for line in lines:
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words and SCRIPT.fullmatch(words[0]):
            yield words


def wrong(words: list[str]) -> list[str]:
    """What a command names that is not there."""
    script, *arguments = words
    path = ROOT / script
    if not os.access(path, os.X_OK):
        return [f"{script} is no script"]
    if script == "ci/test.sh" and arguments[:1] == ["contracts"]:
        return _unknown(cli.commands["contracts"], arguments[1:])
    if script in OWN:
        return [f"{script} knows no {a}" for a in arguments if a not in OWN[script] and not a.isupper()]
    command = _of(path)
    if isinstance(command, click.Group):
        name = arguments[0] if arguments and not arguments[0].startswith("-") else "build"
        if name == "COMMAND" or arguments == ["--help"]:
            return []
        if name not in command.commands:
            return [f"{script} has no command {name}"]
        return _unknown(command.commands[name], arguments)
    return _unknown(command, arguments)


def _of(path: Path) -> click.Command:
    """The command that a script becomes."""
    text = path.read_text()
    if found := re.search(r"-m (k3patches[\w.]*) ?([\w-]*) \"\$@\"", text):
        group = GROUPS[found[1]]
        return group.commands[found[2]] if found[2] else group
    found = re.search(r"^ *k3_contracts \"\$root\" ([\w-]+) ", text, re.M)
    assert found, path
    return cli.commands[found[1]]


def _unknown(command: click.Command, arguments: list[str]) -> list[str]:
    known = {"--help", "-h"}.union(*(p.opts for p in command.params))
    given = [a.partition("=")[0] for a in arguments if a.startswith("-")]
    return [f"{command.name} has no option {option}" for option in given if option not in known]


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: p.stem)
def test_every_command_exists(path: Path) -> None:
    found = list(commands(path.read_text()))
    assert len(found) > 10
    assert [f"{shlex.join(words)}: {w}" for words in found for w in wrong(words)] == []


def test_every_script_is_told_of() -> None:
    told = {words[0] for path in TEXTS for words in commands(path.read_text())}
    assert {f"ci/{p.name}" for p in (ROOT / "ci").glob("*.sh")} - {"ci/env.sh"} <= told


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: p.stem)
def test_every_linked_file_is_there(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
    assert [t for t in targets if not (path.parent / t).exists()] == []


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("ci/edit.sh 0004 --bas 0.33.0", "--bas"),
        ("ci/refreshed.sh", "no script"),
        ("ci/env.sh", "no script"),
        ("./build.sh lints", "no command lints"),
        ("./build.sh --onto X", "--onto"),
        ("./build.sh lint --wheel X", "--wheel"),
        ("ci/test.sh tooling", "tooling"),
        ("ci/test.sh contracts --bases X", "--bases"),
        ("ci/nightly.sh found", "found"),
        ("ci/rebase.sh 0.34.0 --continued", "--continued"),
        ("PIP_NO_INDEX=1 ci/release.sh publish --no", "--no"),
    ],
)
def test_what_does_not_exist_is_found(line: str, word: str) -> None:
    for text in (f"x\n\n```sh\n{line}   # it's a comment\n```\n", f"Then `{line}` does it."):
        [words] = commands(text)
        assert any(word in found for found in wrong(words)), wrong(words)
