"""A stand-in for vLLM that answers from a table: what runs engines is tested with it where there is no GPU.

FAKE_VLLM holds, comma-separated, what it does wrong: ``noisy`` log-probabilities, ``forgets`` weights on reload,
``compiles`` something for long when it is first asked for a single token after a prompt of that length, ``hesitates``
when it is asked so for the third time.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

__version__ = "0.0.1+k3.fake"
FAULTS = set(filter(None, os.environ.get("FAKE_VLLM", "").split(",")))
VOCABULARY = 64
# Which time takes a second more.
SLOW_AT = {"compiles": 1, "hesitates": 3}


def row(token: int, seed: int = 0) -> np.ndarray:
    """Log-probabilities of what follows a token."""
    logits = np.random.default_rng(token + 1000 * seed).normal(size=VOCABULARY) * 3
    return logits - np.log(np.exp(logits).sum())


@dataclass
class SamplingParams:
    max_tokens: int = 16
    temperature: float = 1.0
    prompt_logprobs: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    detokenize: bool = True


@dataclass
class LLM:
    model: str
    tensor_parallel_size: int = 1
    speculative_config: dict[str, Any] | None = None
    seed: int = 0
    other: dict[str, Any] = field(default_factory=dict)
    drafts: int = 0
    asked: Counter[int] = field(default_factory=Counter)

    def __init__(self, model: str, **arguments: Any) -> None:
        self.model, self.other, self.seed, self.drafts, self.asked = model, arguments, 0, 0, Counter()
        self.speculative_config = arguments.get("speculative_config")
        if not list(Path(model).glob("*.safetensors")):
            raise ValueError(f"no weights in {model}")

    def _row(self, token: int) -> np.ndarray:
        noise = 0.01 if "noisy" in FAULTS else 0.0
        return row(token, self.seed) + noise

    def generate(self, prompts: list[dict[str, Any]], params: SamplingParams, use_tqdm: bool = True) -> list[Any]:
        length = len(prompts[0]["prompt_token_ids"])
        if params.max_tokens == 1:
            self.asked[length] += 1
            if self.asked[length] in {SLOW_AT[fault] for fault in FAULTS & SLOW_AT.keys()}:
                time.sleep(1)
        made = []
        for prompt in prompts:
            tokens = list(prompt["prompt_token_ids"])
            scored: list[dict[int, Any] | None] = [None]
            for token in tokens[:-1] if params.prompt_logprobs is not None else ():
                scored.append({i: SimpleNamespace(logprob=float(v)) for i, v in enumerate(self._row(token))})
            chosen, values = [], []
            for _ in range(params.max_tokens):
                last = self._row((tokens + chosen)[-1])
                chosen.append(int(last.argmax()))
                values.append({chosen[-1]: SimpleNamespace(logprob=float(last.max()))})
                self.drafts += 1
            best = SimpleNamespace(token_ids=chosen, logprobs=values if params.logprobs is not None else None)
            made.append(SimpleNamespace(prompt_logprobs=scored, outputs=[best]))
        return made

    def get_metrics(self) -> list[Any]:
        if not self.speculative_config:
            return [SimpleNamespace(name="vllm:prefix_cache_hits", value=3)]
        return [
            SimpleNamespace(name="vllm:spec_decode_num_drafts", value=self.drafts),
            SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens", value=2 * self.drafts),
        ]

    def collective_rpc(self, method: str, **_: Any) -> None:
        if method == "reload_weights" and "forgets" in FAULTS:
            self.seed = 1

    def reset_prefix_cache(self) -> None:
        pass
