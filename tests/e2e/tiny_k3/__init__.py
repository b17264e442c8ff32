"""A Kimi-K3 small enough to run anywhere, with a DSpark drafter, each in several forms of the same weights."""

from __future__ import annotations

from pathlib import Path

from . import drafter, target, vocabulary
from . import folder as folders
from .drafter import DRAFT_TOKENS, DRAFTER_FORMS, DRAFTER_REFERENCES, acceptance_length
from .geometry import OUTER, Geometry
from .target import FORMS, REFERENCES

__all__ = [
    "DRAFTER_FORMS",
    "DRAFTER_REFERENCES",
    "DRAFT_TOKENS",
    "FORMS",
    "REFERENCES",
    "Geometry",
    "acceptance_length",
    "write_drafter",
    "write_target",
]


def write_target(
    folder: Path, form: str, *, seed: int = 0, geometry: Geometry | None = None, outer: bool = True
) -> Path:
    """Write the target in one of `FORMS` to `folder`, whole or not at all, and return it.

    outer: the multimodal KimiK3ForConditionalGeneration with a small vision tower, as K3 is published; otherwise its
    text model KimiLinearForCausalLM alone, which no drafter can be used with.
    """
    _check(form, FORMS)
    geometry = geometry or Geometry()
    tensors = FORMS[form](target.original(geometry, seed))
    config = geometry.config()
    if form == "mixed":
        config["quantization_config"], legacy = target.mixed_metadata(tensors)
    elif form == "compressed-tensors":
        config["quantization_config"] = target.compressed_metadata()
    if not outer:
        tensors = {name.removeprefix(OUTER): tensor for name, tensor in tensors.items() if name.startswith(OUTER)}
        config = {
            **{key: value for key, value in config.items() if key == "quantization_config"},
            **config["text_config"],
        }
    with folders.whole(folder) as made:
        folders.save_tensors(made, tensors)
        vocabulary.write_json(made / "config.json", config)
        if form == "mixed":
            vocabulary.write_json(made / "hf_quant_config.json", legacy)
        vocabulary.save(made)
        if outer:
            vocabulary.write_json(made / "preprocessor_config.json", IMAGE_PROCESSOR)
        vocabulary.write_json(made / "generation_config.json", GENERATION)
    return Path(folder)


def write_drafter(folder: Path, form: str, *, seed: int = 0, geometry: Geometry | None = None) -> Path:
    """Write the drafter of the target of the same seed in one of `DRAFTER_FORMS` to `folder`, whole or not at all."""
    _check(form, DRAFTER_FORMS)
    geometry = geometry or Geometry()
    tensors = DRAFTER_FORMS[form](drafter.original(geometry, seed))
    config = drafter.config(geometry)
    if form in drafter.ANNOUNCEMENTS:
        config["quantization_config"] = drafter.ANNOUNCEMENTS[form].announce()
    with folders.whole(folder) as made:
        folders.save_tensors(made, tensors)
        vocabulary.write_json(made / "config.json", config)
        vocabulary.save(made)
    return Path(folder)


def _check(form: str, forms: dict) -> None:
    if form not in forms:
        raise ValueError(f"there is no form {form!r}: choose from {', '.join(forms)}")


GENERATION = {
    "bos_token_id": vocabulary.BOS,
    "eos_token_id": vocabulary.EOS,
    "pad_token_id": vocabulary.PAD,
    "do_sample": False,
}
# vLLM asks for an image processor even where no image is allowed. K3's own comes as remote code; this stands in for it
# and processes none.
IMAGE_PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "media_tokens_calculator": None,
    "media_proc_cfg": {
        "patch_size": 14,
        "merge_kernel_size": 2,
        "temporal_merge_kernel_size": 4,
        "in_patch_limit": 1024,
        "in_patch_limit_each_frame": 1024,
        "in_patch_limit_video": 4096,
        "patch_limit_on_one_side": 16,
        "fixed_output_tokens": None,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
}
