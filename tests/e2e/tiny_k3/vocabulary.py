"""A vocabulary of numbered words, and the tokenizer's files for it.

Each word is one token, so that text and tokens are the same thing: decoding and encoding again changes nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

VOCABULARY = 512
SPECIAL = (
    "<|pad|>",
    "<|bos|>",
    "<|eos|>",
    "<|unk|>",
    "<|mask|>",  # what stands where a drafter has yet to draft
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|media_pad|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|kimi_image_placeholder|>",
)
PAD, BOS, EOS, UNK, MASK = range(5)
MEDIA = SPECIAL.index("<|media_pad|>")
FIRST_WORD = 16
WORDS = VOCABULARY - FIRST_WORD  # tokens from FIRST_WORD on are words

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokens() -> list[str]:
    """Every token in the order of its number."""
    spare = [f"<|reserved_{number}|>" for number in range(len(SPECIAL), FIRST_WORD)]
    return [*SPECIAL, *spare, *(f"w{number}" for number in range(WORDS))]


def text(numbers: list[int]) -> str:
    """The text of a list of tokens."""
    names = tokens()
    return " ".join(names[number] for number in numbers)


def save(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template."""
    names = tokens()
    special = [
        {
            "id": number,
            "content": name,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number, name in enumerate(names[:FIRST_WORD])
    ]
    write_json(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": special,
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {
                "type": "WordLevel",
                "vocab": {name: number for number, name in enumerate(names)},
                "unk_token": SPECIAL[UNK],
            },
        },
    )
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": SPECIAL[PAD],
            "bos_token": SPECIAL[BOS],
            "eos_token": SPECIAL[EOS],
            "unk_token": SPECIAL[UNK],
            "clean_up_tokenization_spaces": False,
            "model_max_length": 1 << 20,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
