"""Ask the package index that pip is configured for where a file is."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import requests
from pypi_simple import (
    PYPI_SIMPLE_ENDPOINT,
    DistributionPackage,
    NoSuchProjectError,
    PyPISimple,
    UnsupportedContentTypeError,
)

from k3patches.errors import UserError

TIMEOUT_S = 60


@dataclass(frozen=True)
class PipConfig:
    """What pip would use: its indexes in order, its CA bundle and its proxy (``None``: the defaults)."""

    indexes: list[str]
    cert: str | None = None
    proxy: str | None = None

    @property
    def request_options(self) -> dict[str, Any]:
        """The same as keyword arguments of ``requests.get``."""
        proxies = {"http": self.proxy, "https": self.proxy} if self.proxy else None
        return {"verify": self.cert or True, "proxies": proxies, "timeout": TIMEOUT_S}


@dataclass(frozen=True)
class Location:
    """Where a file can be downloaded; ``auth`` is the user and password that the index's own URL carries."""

    url: str
    auth: tuple[str, str] | None


@dataclass(frozen=True)
class Answer:
    """What the index ``url`` has of a project; ``trouble`` says what kept it from answering."""

    url: str
    packages: list[DistributionPackage] = field(default_factory=list)
    known: bool = True
    trouble: str = ""

    @property
    def host(self) -> str | None:
        return urlsplit(self.url).hostname


def pip_config() -> PipConfig:
    """Read pip's configuration: its files, overridden by PIP_* variables as pip itself does."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode:
        raise UserError(f"pip cannot say which package index is configured: {listed.stderr.strip()}")
    values = dict(line.partition("=")[::2] for line in listed.stdout.splitlines())

    def setting(name: str) -> str:
        # The environment beats a command's own section, which beats the global one.
        keys = (f":env:.{name}", f"download.{name}", f"global.{name}")
        return next((str(ast.literal_eval(values[k])) for k in keys if k in values), "")

    urls = [setting("index-url") or PYPI_SIMPLE_ENDPOINT, *setting("extra-index-url").split()]
    return PipConfig(
        indexes=[u for u in urls if u.startswith(("http://", "https://"))],
        cert=setting("cert") or None,
        proxy=setting("proxy") or None,
    )


def ask(project: str, config: PipConfig) -> Iterator[Answer]:
    """What each configured index says of ``project``, in order; one is asked only when its answer is wanted."""
    for url in config.indexes:
        session = requests.Session()
        session.verify = config.request_options["verify"]
        session.proxies.update(config.request_options["proxies"] or {})
        try:
            with PyPISimple(url, session=session) as client:
                packages = client.get_project_page(project, timeout=TIMEOUT_S).packages
        except NoSuchProjectError:
            yield Answer(url, known=False)
        except (requests.RequestException, UnsupportedContentTypeError) as e:
            yield Answer(url, trouble=type(e).__name__)
        else:
            yield Answer(url, packages)


def find(project: str, filename: str, config: PipConfig) -> Location:
    """Where the first configured index that has ``filename`` keeps it."""
    trouble = None
    for answer in ask(project, config):
        if answer.trouble:
            trouble = f"{answer.host}: {answer.trouble}"
        for package in answer.packages:
            if package.filename == filename:
                return Location(package.url, _credentials(answer.url, package.url))
    if trouble:
        raise UserError(
            f"cannot ask the package index for {filename} ({trouble}): check the network and pip's index-url, "
            f"or give a downloaded file with --sdist or --wheel"
        )
    raise UserError(
        f"no configured package index has {filename}: check pip's index-url, or give the file with --sdist or --wheel"
    )


def _credentials(index: str, file: str) -> tuple[str, str] | None:
    # A password for the index must not travel to whatever other host keeps the files.
    a, b = urlsplit(index), urlsplit(file)
    if a.username and a.hostname == b.hostname and a.port == b.port:
        return a.username, a.password or ""
    return None
