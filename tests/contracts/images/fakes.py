"""K3's tokenizer and image processor in small, and vLLM's own multimodal processor over them."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import BatchFeature, PreTrainedTokenizerFast

PLACEHOLDER = "<|kimi_image_placeholder|>"
PAD, BEGIN, CONTENT, END = "<|media_pad|>", "<|media_begin|>", "<|media_content|>", "<|media_end|>"
PATCH, MERGE = 14, 2


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each character and for each of K3's media markers."""
    characters = [chr(code) for code in range(32, 127)]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(["[UNK]", *characters])}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    fast.add_special_tokens({"additional_special_tokens": [PLACEHOLDER, PAD, BEGIN, CONTENT, END]})
    return fast


def grid(image: Image.Image) -> tuple[int, int]:
    """Rows and columns of patches, whole merge windows of them."""
    side = PATCH * MERGE
    return MERGE * -(-image.height // side), MERGE * -(-image.width // side)


def media_tokens(image: Image.Image) -> int:
    rows, columns = grid(image)
    return rows * columns // MERGE**2


class ImageProcessor:
    """As the checkpoint's: it takes media dicts, and knows nothing of text."""

    media_proc_cfg = {  # noqa: RUF012
        "patch_size": PATCH,
        "merge_kernel_size": MERGE,
        "in_patch_limit": 4096,
        "patch_limit_on_one_side": 16,
        "fixed_output_tokens": None,
    }

    def media_tokens_calculator(self, media: dict[str, Any]) -> int:
        assert media["type"] == "image"
        return media_tokens(media["image"])

    def preprocess(self, medias: list[dict[str, Any]], return_tensors: Any = None, **kwargs: Any) -> BatchFeature:
        grids = [(1, *grid(media["image"])) for media in medias]
        patches = [
            torch.full((rows * columns, 3, PATCH, PATCH), float(media["image"].getpixel((0, 0))[0]))
            for media, (_, rows, columns) in zip(medias, grids, strict=True)
        ]
        return BatchFeature({"pixel_values": torch.cat(patches), "grid_thws": torch.tensor(grids)})


class K3:
    """vLLM's processor for Kimi-K3, as an engine builds it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, cached: bool = False) -> None:
        from vllm.config.multimodal import MultiModalConfig
        from vllm.models.kimi_k3.common import mm_preprocess
        from vllm.multimodal.cache import MultiModalProcessorOnlyCache
        from vllm.multimodal.processing import InputProcessingContext
        from vllm.transformers_utils.configs.kimi_k3 import KimiK3Config

        monkeypatch.setattr(mm_preprocess, "cached_get_image_processor", lambda *args, **kwargs: ImageProcessor())
        self.tokenizer = make_tokenizer()
        multimodal = MultiModalConfig()
        model_config = SimpleNamespace(
            model="kimi-k3",
            revision=None,
            trust_remote_code=False,
            dtype=torch.bfloat16,
            max_model_len=4096,
            encoder_config=None,
            hf_config=KimiK3Config(media_placeholder_token_id=self.tokenizer.convert_tokens_to_ids(PAD)),
            hf_image_processor_config={},
            multimodal_config=multimodal,
            get_multimodal_config=lambda: multimodal,
        )
        context = InputProcessingContext(model_config=model_config, tokenizer=self.tokenizer)
        info = mm_preprocess.KimiK3ProcessingInfo(context)
        dummies = mm_preprocess.KimiK3DummyInputsBuilder(info)
        processor = mm_preprocess.KimiK3MultiModalProcessor
        self._cache = MultiModalProcessorOnlyCache(model_config) if cached else None
        # Later releases take the cache with each call instead.
        self._cache_at_call = "cache" not in inspect.signature(processor.__init__).parameters
        self.processor = processor(info, dummies, **({} if self._cache_at_call else {"cache": self._cache}))

    def __call__(self, prompt: str | list[int], images: list[Image.Image]) -> Any:
        items = self.processor.info.parse_mm_data({"image": images} if images else {})
        return self.processor(prompt, items, **({"cache": self._cache} if self._cache_at_call else {}))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)
