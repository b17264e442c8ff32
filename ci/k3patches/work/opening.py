"""Open the series at a patch: the patches up to it as commits, the later ones set aside."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from k3patches import series
from k3patches import tree as trees
from k3patches.errors import UserError
from k3patches.git import GitError, git, git_as_user
from k3patches.pr import stack
from k3patches.rebase import gitwork
from k3patches.rebase.progress import Progress
from k3patches.series import Patch
from k3patches.work.place import FILE, Place, State, digests

# The tag on the whole series as it was opened.
SERIES_TAG = "series"
# Where quilt looks for a series, and where it keeps what it knows of the tree.
QUILT_PATCHES, QUILT_STATE = "patches", ".pc"
IDENTITY = ("user.name", "user.email")

Start = Callable[[Path, State], None]


def at_patch(place: Place, wanted: str) -> State:
    """Open the series at the patch that ``wanted``, a number or a fix's id, means."""
    patches = place.patches
    return _open(place, patches, patches.index(stack.find(patches, wanted)) + 1)


def with_quilt(place: Place) -> State:
    """Open the series for quilt: the pristine source, with the patches in patches/ and none applied."""

    def start(tree: Path, state: State) -> None:
        state.quilt = True
        git("reset", "-q", "--hard", state.pristine, cwd=tree)
        (tree / QUILT_PATCHES).mkdir()
        for name in [series.SERIES_FILE, *state.series]:
            shutil.copy2(place.series_dir / name, tree / QUILT_PATCHES)
        with (tree / ".git" / "info" / "exclude").open("a") as exclude:
            exclude.write(f"/{QUILT_PATCHES}/\n/{QUILT_STATE}/\n")

    return _open(place, place.patches, len(place.patches), start)


def at_end(place: Place, start: Start) -> State:
    """Open the whole series, and have ``start`` add to the tree and to what is remembered of it."""
    return _open(place, place.patches, len(place.patches), start)


def require_none(place: Place) -> None:
    if (place.folder / FILE).is_file():
        state = place.state()
        raise UserError(
            f"{place.shown(place.tree)} holds an edit of {state.fix or state.patch}: write it back with "
            f"{place.command('refresh.sh')}, or throw it away with {place.command('edit.sh', '--abort')}"
        )


def _open(place: Place, patches: list[Patch], count: int, start: Start | None = None) -> State:
    require_none(place)
    with Progress([]).step(f"vLLM {place.release} with {len(patches)} patches"):
        pristine = place.store.pristine(place.source())
        commits = place.store.series(pristine, patches)
    later = [(p.name, c) for p, c in zip(patches[count:], commits[count:], strict=True)]
    name = patches[count - 1].name if count else series.SERIES_FILE
    state = State(name, pristine, digests(place.series_dir), later)
    with trees.replacing(place.folder) as new:
        tree = new / "tree"
        gitwork.work_tree(tree, pristine, [place.store.objects])
        git("reset", "-q", "--hard", [pristine, *commits][count], cwd=tree)
        git("tag", SERIES_TAG, [pristine, *commits][-1], cwd=tree)
        _share_identity(place.project.root, tree)
        if start:
            start(tree, state)
        state.save(new)
    return state


def _share_identity(checkout: Path, tree: Path) -> None:
    """Have commits in ``tree`` be by whom those in this checkout are, where it alone says so."""
    for key in IDENTITY:
        try:
            value = git_as_user("config", "--local", key, cwd=checkout).strip()
        except GitError:
            continue
        git("config", key, value, cwd=tree)
