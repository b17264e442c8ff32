"""Contract image-placeholder: each image's placeholder becomes that image's media block, in its place.

K3's HF processor only tokenizes; the expansion is vLLM's own.  A framework that
takes the processor's word for it finds no placeholders, or counts the wrong
ones.  So: whatever way the prompt comes in, every image gets its block with as
many pads as it has features, in order, and only pads are embedding slots.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from images.fakes import BEGIN, CONTENT, END, K3, PAD, PLACEHOLDER, grid, media_tokens
from PIL import Image


def image(width: int, height: int, shade: int = 0) -> Image.Image:
    return Image.new("RGB", (width, height), (shade, 0, 0))


def check(k3: K3, texts: list[str], images: list[Image.Image], *, as_tokens: bool) -> None:
    """texts: what stands before the first image, between images, and after the last one."""
    prompt = PLACEHOLDER.join(texts)
    result = k3(k3.encode(prompt) if as_tokens else prompt, images)

    want, slots = k3.encode(texts[0]), []
    for picture, text in zip(images, texts[1:], strict=True):
        head = k3.encode(f"{BEGIN}image {picture.width}x{picture.height}{CONTENT}")
        tail = k3.encode(END)
        pads = media_tokens(picture)
        slots.append((len(want), len(head) + pads + len(tail), len(want) + len(head), pads))
        want += head + pads * k3.encode(PAD) + tail + k3.encode(text)
    assert result["prompt_token_ids"] == want

    placeholders = result["mm_placeholders"].get("image", [])
    assert len(placeholders) == len(images)
    for found, (offset, length, first_pad, pads) in zip(placeholders, slots, strict=True):
        assert (found.offset, found.length) == (offset, length)
        marked = [offset + i for i, slot in enumerate(found.is_embed.tolist()) if slot]
        assert marked == list(range(first_pad, first_pad + pads))

    items = result["mm_kwargs"].get("image", [])
    assert len(items) == len(images)
    for item, picture in zip(items, images, strict=True):
        assert item["grid_thws"].data.tolist() == [1, *grid(picture)]
        assert float(item["pixel_values"].data.float().mean()) == picture.getpixel((0, 0))[0]


forms = pytest.mark.parametrize("as_tokens", [False, True], ids=["text", "tokens"])
caches = pytest.mark.parametrize("cached", [False, True], ids=["no_cache", "cache"])


@forms
@caches
@pytest.mark.parametrize(
    ("texts", "sizes"),
    [
        (["Look: ", " What is it?"], [(28, 28)]),
        (["", ""], [(57, 30)]),
        (["a", "", "b"], [(28, 56), (84, 28)]),
        (["", " and ", " and ", "."], [(100, 10), (10, 100), (28, 28)]),
        (["same ", " same ", ""], [(30, 30), (30, 30)]),
        (["no image at all"], []),
    ],
)
def test_in_place(
    monkeypatch: pytest.MonkeyPatch, texts: list[str], sizes: list[tuple[int, int]], cached: bool, as_tokens: bool
) -> None:
    k3 = K3(monkeypatch, cached=cached)
    images = [image(*size, shade=index + 1) for index, size in enumerate(sizes)]
    check(k3, texts, images, as_tokens=as_tokens)
    check(k3, texts, images, as_tokens=as_tokens)  # what the first time cached


words = st.text(alphabet="abc xyz,.?", max_size=8)
sizes = st.tuples(st.integers(1, 120), st.integers(1, 120))


@given(data=st.data(), count=st.integers(0, 4), as_tokens=st.booleans(), cached=st.booleans())
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_prompt(
    monkeypatch: pytest.MonkeyPatch, data: st.DataObject, count: int, as_tokens: bool, cached: bool
) -> None:
    texts = data.draw(st.lists(words, min_size=count + 1, max_size=count + 1))
    images = [image(*data.draw(sizes), shade=index + 1) for index in range(count)]
    check(K3(monkeypatch, cached=cached), texts, images, as_tokens=as_tokens)


def test_a_processor_taken_for_one_that_expands_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the checkpoint's own runtime patch was for; this test is the proof that the ones above can fail."""
    k3 = K3(monkeypatch)
    if not hasattr(k3.processor, "_hf_processor_applies_updates"):
        pytest.skip("absent: no hook through which vLLM could take the processor's word for it")
    monkeypatch.setattr(type(k3.processor), "_hf_processor_applies_updates", lambda *args, **kwargs: True)
    with pytest.raises((AssertionError, RuntimeError)):
        check(k3, ["Look: ", " What is it?"], [image(28, 28)], as_tokens=False)
