"""Get a pinned archive: from a file, from the cache, or from the package index."""

from __future__ import annotations

import hashlib
import logging
import shutil
import sys
from pathlib import Path

import click
import platformdirs
import pooch
import requests
from filelock import FileLock

from k3patches import index
from k3patches.base import Artifact
from k3patches.errors import UserError

RETRIES = 3
PROJECT = "vllm"


def default_cache() -> Path:
    return Path(platformdirs.user_cache_dir("k3-patches"))


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def given(path: Path, artifact: Artifact) -> Path:
    """Check a file that the user gave in the place of ``artifact``."""
    if not path.is_file():
        raise UserError(f"{path} is not there: give the downloaded {artifact.filename}")
    if path.name != artifact.filename:
        raise UserError(f"{path.name} is another file than this base's {artifact.filename}: give that one")
    _require(path, artifact, "give an intact copy")
    return path


def fetch(artifact: Artifact, cache: Path) -> Path:
    """The cached copy of ``artifact``, downloaded first where the cache lacks it.

    A file appears in the cache whole and checked, or not at all; a cache that has it
    is only read, so a read-only one serves.
    """
    path = cache / artifact.filename
    if path.is_file():
        _require(path, artifact, "delete it, and it is downloaded again")
        return path
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = FileLock(cache / f".{artifact.filename}.lock")
        lock.acquire()
    except OSError as e:
        raise UserError(f"cannot write to the cache {cache} ({e.strerror}): name another with --cache") from None
    try:
        if not path.is_file():
            _download(artifact, cache)
    finally:
        lock.release()
    return path


def _download(artifact: Artifact, cache: Path) -> None:
    config = index.pip_config()
    location = index.find(PROJECT, artifact.filename, config)
    # Holding this file's lock, whatever an interrupted download of it left behind is garbage.
    partial = cache / f".{artifact.filename}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        _into(partial, artifact, location, config).replace(cache / artifact.filename)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _into(folder: Path, artifact: Artifact, location: index.Location, config: index.PipConfig) -> Path:
    click.echo(f"fetching {artifact.filename} ({artifact.size / 2**20:.0f} MiB)", err=True)
    store = pooch.create(
        path=folder,
        base_url="",
        registry={artifact.filename: f"sha256:{artifact.sha256}"},
        urls={artifact.filename: location.url},
        retry_if_failed=RETRIES,
    )
    pooch.get_logger().setLevel(logging.WARNING)
    downloader = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), auth=location.auth, **config.request_options)
    try:
        return Path(store.fetch(artifact.filename, downloader=downloader))
    except ValueError as e:
        raise UserError(
            f"the index serves another {artifact.filename} than the pinned one, also after {RETRIES} more tries "
            f"({e}): check pip's index-url, or give a good copy with --sdist or --wheel"
        ) from None
    except requests.RequestException as e:
        raise UserError(
            f"the download of {artifact.filename} failed {RETRIES + 1} times ({_reason(e)}): "
            f"try again, or give the file with --sdist or --wheel"
        ) from None


def _reason(error: requests.RequestException) -> str:
    if error.response is not None:
        return f"HTTP status {error.response.status_code}"
    return type(error).__name__


def _require(path: Path, artifact: Artifact, way_out: str) -> None:
    found = sha256(path)
    if found != artifact.sha256:
        raise UserError(f"{path} has sha256 {found}, but {artifact.sha256} is pinned: {way_out}")
