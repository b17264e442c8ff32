"""Byte code of trees that nothing may be written into: stored elsewhere, under a checksum of the source.

Trees share what they have in common, and none gets what was compiled from another source, whatever the files' dates.
"""

from __future__ import annotations

import hashlib
import sys
from importlib.machinery import FileFinder, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING

from k3patches.project import Project

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def install(tree: Path, store: Path | None = None) -> None:
    """Import what lies in ``tree`` so from now on; ``store`` is a folder of the checkout's, if not given."""
    folder = store or Project.find().root / "build" / "bytecode"

    class Loader(SourceFileLoader):
        def get_code(self, fullname: str) -> CodeType | None:
            written, sys.dont_write_bytecode = sys.dont_write_bytecode, False
            try:
                return super().get_code(fullname)
            finally:
                sys.dont_write_bytecode = written

        def path_stats(self, path: str) -> dict[str, float]:
            source = self.get_data(path)
            self.digest = hashlib.sha256(source).hexdigest()
            return {"mtime": 0, "size": len(source)}

        def get_data(self, path: str) -> bytes:
            return super().get_data(self._stored(path) if path.endswith(".pyc") else path)

        def set_data(self, path: str, data: ReadableBuffer, *, _mode: int = 0o666) -> None:
            super().set_data(self._stored(path), data, _mode=_mode)

        def _stored(self, path: str) -> str:
            # NAME.cpython-311.opt-1.pyc: what follows the name says which interpreter it is for.
            return str(folder / (self.digest + "".join(Path(path).suffixes)))

    def finder(path: str) -> FileFinder:
        if not Path(path).is_relative_to(tree):
            raise ImportError
        return FileFinder(path, (Loader, [".py"]))

    sys.path_hooks.insert(0, finder)
    PathFinder.invalidate_caches()
    sys.path_importer_cache.clear()
