"""What holds for any input: nothing but a user's error comes of noise, and nothing is lost on the way through."""

from __future__ import annotations

import json
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from k3patches import base, contents, series, wheelfiles
from k3patches.base import Artifact
from k3patches.errors import UserError
from k3patches.manifest import Manifest, PatchRecord
from miniature import BUILT, OFFICIAL, PATCHES, RELEASE, VERSION, VERSION_PY, Mini
from packaging.version import Version

fast = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

texts = st.text(st.characters(codec="utf-8"), max_size=20)
releases = st.lists(st.integers(0, 99), min_size=2, max_size=4).map(lambda parts: ".".join(map(str, parts)))
locals_ = st.from_regex(r"(\+[a-z]{1,3}\d?(\.[a-z]{1,3}|\.\d{1,2}){0,2})?", fullmatch=True)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@fast
@given(releases, locals_)
def test_a_stamped_version_file_says_just_that_version(release: str, local: str) -> None:
    version = release + local
    stamped = wheelfiles.set_version_file(VERSION_PY.encode(), version)
    namespace: dict[str, object] = {}
    exec(stamped, namespace)
    assert namespace["__version__"] == namespace["version"] == version
    expected = (*Version(release).release, *([local[1:]] if local else []))
    assert namespace["__version_tuple__"] == namespace["version_tuple"] == expected
    # Every other line stays, and doing it again changes nothing.
    lines = [line for line in stamped.decode().splitlines() if "version = " not in line and "tuple = " not in line]
    assert lines == [line for line in VERSION_PY.splitlines() if "version = " not in line and "tuple = " not in line]
    assert wheelfiles.set_version_file(stamped, version) == stamped


@fast
@given(st.binary(max_size=60))
def test_a_version_file_of_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(UserError, match="setuptools-scm"):
        wheelfiles.set_version_file(noise, VERSION)


@fast
@given(st.lists(st.tuples(st.sampled_from(["Author", "Tag", "X-A"]), texts)), st.binary(max_size=40), texts)
@example([("Author", "A\x0bB\x1cC\u2028D\x85E")], b"body\n\nTag: not a header\n", "x")
def test_a_header_is_replaced_and_all_else_is_kept(headers: list[tuple[str, str]], body: bytes, first: str) -> None:
    clean = [(name, value.replace("\n", " ").replace("\r", " ")) for name, value in headers]
    lines = [f"{name}: {value}" for name, value in clean]
    content = "\n".join([*lines, "Tag: old"]).encode() + b"\n\n" + body
    result = wheelfiles._set_header(content, "Tag", ["new-1", "new-2"])
    head, _, rest = result.partition(b"\n\n")
    assert rest == body
    assert [line for line in head.decode().split("\n") if not line.startswith("Tag: ")] == [
        line for line in lines if not line.startswith("Tag: ")
    ]
    assert message_from_bytes(result).get_all("Tag") == ["new-1", "new-2"]


names = st.from_regex(r"vllm/[a-z]{1,8}(/[a-z]{1,8})?\.(py|so|json)", fullmatch=True)


@fast
@given(st.dictionaries(names, st.binary(max_size=200), max_size=6), st.data())
def test_rewriting_keeps_every_untouched_member(mini: Mini, extra: dict[str, bytes], data: st.DataObject) -> None:
    info, new_info = f"vllm-{RELEASE}.dist-info", f"vllm-{VERSION}.dist-info"
    files = {
        **extra,
        "vllm/_version.py": VERSION_PY.encode(),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {RELEASE}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nTag: cp38-abi3-linux_x86_64\n",
        f"{info}/licenses/LICENSE": b"x",
    }
    old, new = mini.root / OFFICIAL["x86_64"], mini.root / BUILT["x86_64"]
    with wheelfiles.WheelFile(old, "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
    changed = (
        data.draw(st.dictionaries(st.sampled_from(sorted(extra)), st.none() | st.binary(max_size=9))) if extra else {}
    )
    added = data.draw(st.dictionaries(names.filter(lambda name: name not in files), st.binary(max_size=9), max_size=2))
    wheelfiles.rewrite(old, new, {**changed, **added}, {"x.json": b"{}"}, 1_700_000_000)
    with wheelfiles.opened(new) as wheel:
        found = {name: wheel.read(name) for name in wheel.namelist() if name != wheel.record_path}
    stamped = {"vllm/_version.py", f"{new_info}/METADATA", f"{new_info}/WHEEL"}
    expected = {**files, **changed, **added, f"{new_info}/x.json": b"{}"}
    kept = {n.replace(info, new_info): c for n, c in expected.items() if c is not None}
    assert found.keys() == kept.keys()
    assert {n: c for n, c in found.items() if n not in stamped} == {n: c for n, c in kept.items() if n not in stamped}


several = st.lists(texts, max_size=2)
records = st.builds(PatchRecord, texts, texts, texts, several, several, texts, several)
manifests = st.builds(
    Manifest,
    version=texts,
    base=texts,
    commit=texts,
    build=texts,
    source=texts,
    pins=st.dictionaries(texts, st.builds(Artifact, texts, texts, st.integers()), max_size=2),
    patches=st.lists(records, max_size=2),
    files=st.dictionaries(texts, st.none() | texts, max_size=3),
)


@fast
@given(manifests)
def test_a_manifest_comes_back_as_it_was(manifest: Manifest) -> None:
    assert Manifest.parse(manifest.dump()) == manifest
    assert Manifest.parse(manifest.dump()).dump() == manifest.dump()


@fast
@given(st.binary(max_size=80) | json_values.map(lambda value: json.dumps(value).encode()))
def test_a_manifest_of_noise_is_a_value_error(noise: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        Manifest.parse(noise)


@fast
@given(st.data(), manifests)
def test_status_survives_any_value_in_a_manifest(data: st.DataObject, manifest: Manifest) -> None:
    """Whatever stands in one field: it is either taken for what it is, or the wheel for tampered with."""
    raw = json.loads(manifest.dump())
    holder = raw if not raw["patches"] or data.draw(st.booleans()) else raw["patches"][0]
    holder[data.draw(st.sampled_from(sorted(holder)))] = data.draw(json_values)
    status = contents._judge("here", "1", json.dumps(raw).encode(), lambda name: None, {})
    assert status.verdict in (contents.Verdict.WHOLE, contents.Verdict.TAMPERED)
    json.loads(status.to_json())


@fast
@given(st.binary(max_size=120) | st.text(max_size=120).map(lambda text: text.encode("utf-8", "surrogatepass")))
@example(b"0001-a.patch\n\xff")
@example("0001-a.patch\u20280002-b.patch".encode())
@example(b"\x00")
def test_any_series_file_is_names_or_a_users_error(mini: Mini, noise: bytes) -> None:
    (mini.series_dir / "series").write_bytes(noise)
    try:
        found = series.listed(mini.series_dir)
    except UserError:
        return
    assert all(series.NAME.fullmatch(name) for name in found)
    assert len(set(found)) == len(found)


HEADS = (b"", b"From: a <a@b.example>\nSubject: [PATCH] x\n")


@fast
@given(st.data(), st.binary(max_size=200))
@example(None, b"From: a\nSubject: b\nContent-Type: text/plain; charset=nonsense\n\nx\n---\ndiff --git a/x b/x\n")
@example(None, b"From: a\nSubject: b\nContent-Type: multipart/mixed; boundary=x\n\n--x\n\n--x--\n")
@example(None, b"From: a\nSubject: =?utf-8?q?=FF?=\nContent-Transfer-Encoding: base64\n\n!!!!\n---\n")
@example(None, b"From: a\nSubject: b\n\nx\n---\ndiff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n*x\n")
def test_any_patch_file_is_a_patch_or_a_users_error(mini: Mini, data: st.DataObject | None, noise: bytes) -> None:
    path = mini.root / "0001-x.patch"
    if data is not None:
        # Noise over a good patch gets further than noise alone.
        good = (mini.series_dir / PATCHES[0]).read_bytes()
        at = data.draw(st.integers(0, len(good)))
        noise = data.draw(st.sampled_from([noise, good[:at] + noise + good[at + len(noise) :], good[:at]]))
    path.write_bytes(noise)
    try:
        patch = series.read(path)
    except UserError:
        return
    assert patch.data == noise
    assert all(isinstance(name, str) for name in patch.files)


@fast
@given(
    st.binary(max_size=100)
    | st.dictionaries(st.from_regex(r"[a-z]{1,9}", fullmatch=True), texts).map(
        lambda entries: "".join(f"{key} = {json.dumps(value)}\n" for key, value in entries.items()).encode()
    )
)
def test_any_base_toml_is_a_base_or_a_users_error(mini: Mini, noise: bytes) -> None:
    (mini.series_dir / "base.toml").write_bytes(noise)
    with pytest.raises(UserError):
        base.load(mini.series_dir)


@fast
@given(st.data())
def test_any_damage_to_a_wheel_is_found_or_harmless(built_pattern: Mini, mini: Mini, data: st.DataObject) -> None:
    content = bytearray(built_pattern.wheel().read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path: Path = mini.root / BUILT["x86_64"]
    path.write_bytes(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))])
    try:
        status = contents.of_wheel(path)
    except UserError:
        return
    if status.verdict is contents.Verdict.WHOLE:
        with zipfile.ZipFile(path) as damaged, zipfile.ZipFile(built_pattern.wheel()) as whole:
            assert {n: damaged.read(n) for n in damaged.namelist()} == {n: whole.read(n) for n in whole.namelist()}
