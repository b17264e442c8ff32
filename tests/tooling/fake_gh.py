"""A stand-in for gh on PATH: the few routes of the host's REST interface that the nightly run uses, and no other.

What it knows lies in the JSON file that $FAKE_GH names.  An argument, a route or a field that the real host does
not take ends it with an error, so that the tests hold for the real one as well.  Lists come in pages of two.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

OWNER, REPOSITORY = "somebody", "k3"
PAGE = 2
Json = dict[str, Any]


class Refused(Exception):
    """The host's answer is an error: its status, and what it says."""

    def __init__(self, status: int, message: str, **more: Any) -> None:
        super().__init__(message)
        self.status = status
        self.answer = {"message": message, **more}


def empty(remote: Path) -> Json:
    """The state of a host whose git repository is ``remote``."""
    return {"remote": str(remote), "labels": [], "items": [], "log": [], "refuse": {}, "calls": 0, "releases": {}}


def serve(state: Json, method: str, route: str, data: Json | None) -> Any:
    url = urlsplit(route)
    query = {name: values[0] for name, values in parse_qs(url.query, strict_parsing=bool(url.query)).items()}
    top = f"repos/{OWNER}/{REPOSITORY}"
    if url.path != top and not url.path.startswith(f"{top}/"):
        raise Refused(404, "Not Found")
    path = url.path[len(top) + 1 :]
    for name, message in state["refuse"].items():
        if name == f"{method} {path}":
            raise Refused(403, message)
    if method != "GET":
        state["log"].append([method, path, data])
    key = (method, re.sub(r"\d+", "N", path))
    number = int(re.sub(r"\D", "", path) or 0)
    if key == ("GET", ""):
        return {"default_branch": "main", "owner": {"login": OWNER}}
    if key == ("GET", "issues"):
        _only(query, "labels", "state", "sort", "direction", "per_page")
        assert (query["state"], query["direction"]) == ("all", "asc")
        return [i for i in state["items"] if query["labels"] in i["labels"]]
    if key == ("GET", "pulls"):
        _only(query, "head", "state", "per_page")
        return [i for i in reversed(state["items"]) if "head" in i and i["head"] == query["head"]]
    if key == ("POST", "labels"):
        _only(data, "name")
        if data["name"] in state["labels"]:
            raise Refused(422, "Validation Failed", errors=[{"resource": "Label", "code": "already_exists"}])
        state["labels"].append(data["name"])
        return {}
    if key == ("POST", "issues"):
        _only(data, "title", "body", "labels")
        return _add(state, "issues", {**data, "state": "open", "state_reason": None})
    if key == ("POST", "issues/N/comments"):
        _only(data, "body")
        _item(state, number)["comments"].append(data["body"])
        return {}
    if key in (("PATCH", "issues/N"), ("PATCH", "pulls/N")):
        _only(data, "title", "body", *(["state", "state_reason"] if key[1] == "issues/N" else []))
        _item(state, number).update(data)
        return {}
    if key == ("POST", "pulls"):
        return _pull_request(state, data)
    if key == ("POST", "actions/workflows/test.yml/dispatches"):
        _only(data, "ref")
        _commit(state, data["ref"])
        return None
    raise Refused(404, "Not Found")


def _pull_request(state: Json, data: Json) -> Json:
    _only(data, "head", "base", "title", "body", "maintainer_can_modify")
    head = f"{OWNER}:{data['head']}"
    if _commit(state, data["head"]) == _commit(state, data["base"]):
        raise Refused(422, "Validation Failed", errors=[{"message": "No commits between the branches"}])
    if any(i.get("head") == head and i["state"] == "open" for i in state["items"]):
        raise Refused(422, "Validation Failed", errors=[{"message": "A pull request already exists"}])
    made = {**data, "head": head, "state": "open", "merged_at": None, "labels": [], "pull_request": {}}
    return _add(state, "pull", made)


def _add(state: Json, kind: str, item: Json) -> Json:
    if not item["title"] or len(item["body"]) > 65536:
        raise Refused(422, "Validation Failed", errors=[{"message": "body is too long (maximum is 65536 characters)"}])
    number = len(state["items"]) + 1
    address = f"https://host.example/{OWNER}/{REPOSITORY}/{kind}/{number}"
    state["items"].append({"number": number, "html_url": address, "comments": [], **item})
    return state["items"][-1]


def _item(state: Json, number: int) -> Json:
    if not 0 < number <= len(state["items"]):
        raise Refused(404, "Not Found")
    return state["items"][number - 1]


def _commit(state: Json, branch: str, kind: str = "heads") -> str:
    told = subprocess.run(
        ["git", "rev-parse", "--verify", f"refs/{kind}/{branch}"], cwd=state["remote"], capture_output=True, text=True
    )
    if told.returncode:
        raise Refused(422, "Validation Failed", errors=[{"message": f"no branch {branch}"}])
    return told.stdout.strip()


def _only(given: Json | None, *names: str) -> None:
    if unknown := set(given or {}).difference(names):
        raise Refused(422, f"not known here: {unknown}")


def release(state: Json, verb: str, tag: str, options: Sequence[str]) -> str:
    """``gh release VERB TAG``, as far as ci/release.sh uses it."""
    if verb in state["refuse"]:
        raise Refused(500, state["refuse"].pop(verb))
    found = state["releases"].get(tag)
    if verb == "create":
        assert options[:2] == ["--verify-tag", "--draft"], options
        flags = dict(zip(options[2::2], options[3::2], strict=True))
        assert set(flags) == {"--title", "--notes-file"}, options
        _commit(state, tag, "tags")
        notes = Path(flags["--notes-file"]).read_text()
        state["releases"][tag] = {"title": flags["--title"], "notes": notes, "draft": True, "assets": {}}
        return ""
    if not found:
        raise Refused(404, "release not found")
    if verb == "view":
        assert options == ["--json", "isDraft"], options
        return json.dumps({"isDraft": found["draft"]})
    if verb == "upload":
        assert options[1:] == ["--clobber"], options
        content = Path(options[0]).read_bytes()
        found["assets"][Path(options[0]).name] = hashlib.sha256(content).hexdigest()
        return ""
    assert (verb, options) == ("edit", ["--draft=false"]), (verb, options)
    found["draft"] = False
    return ""


def main(arguments: Sequence[str]) -> int:
    if list(arguments[:2]) == ["auth", "git-credential"]:
        return 0
    path = Path(os.environ["FAKE_GH"])
    state = json.loads(path.read_text())
    if arguments[0] == "release":
        try:
            print(release(state, arguments[1], arguments[2], list(arguments[3:])), end="")
        except Refused as e:
            print(e, file=sys.stderr)
            return 1
        finally:
            path.write_text(json.dumps(state))
        return 0
    assert arguments[0] == "api", arguments
    route, options = arguments[1], list(arguments[2:])
    pages = "--paginate" in options
    if pages:
        options.remove("--paginate")
    method, data = "GET", None
    if options:
        flag, method, *rest = options
        assert (flag, rest) == ("--method", ["--input", "-"]), options
        data = json.loads(sys.stdin.read())
    state["calls"] += 1
    try:
        answer = serve(state, method, route.replace("{owner}", OWNER).replace("{repo}", REPOSITORY), data)
    except Refused as e:
        print(json.dumps(e.answer), end="")
        print(f"gh: {e} (HTTP {e.status})", file=sys.stderr)
        return 1
    path.write_text(json.dumps(state))
    if pages:
        for start in range(0, max(len(answer), 1), PAGE):
            print(json.dumps(answer[start : start + PAGE]), end="")
    elif isinstance(answer, list):
        print(json.dumps(answer[:PAGE]))
    elif answer is not None:
        print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
