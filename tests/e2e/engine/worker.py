"""One engine in a process of its own: load, score the fixed prompts, generate, reload, measure.

    python -m engine.worker JOB.json

JOB.json names the case, folders and where results go.  The result file is written after each part, so that what ran
is known even when a later part ends the process.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tiny_k3

from engine import prompts
from engine.turns import Turns

TIMED_PROMPTS, TIMED_LENGTH, TIMED_SHORT, TIMED_GENERATED, TIMED_ROUNDS = 32, 1024, 16, 128, 7
CACHE_BYTES = 1 << 30
LONGEST = 2048


class Results:
    """What is known so far, in a file that is whole at any time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, Any] = {}

    def add(self, **values: Any) -> None:
        self.values |= values
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.values))
        new.replace(self.path)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Record an error of this part, and go on."""
        start = time.perf_counter()
        try:
            yield
        except Exception as e:
            traceback.print_exc()
            self.add(**{f"{name}_error": f"{type(e).__name__}: {e}"[:2000]})
        self.add(**{f"{name}_s": round(time.perf_counter() - start, 1)})


def engine_arguments(case: dict[str, Any], folders: dict[str, str], share: float) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM``; ``share`` is the part of a GPU's memory that it may take."""
    made: dict[str, Any] = {
        "model": folders[case["target"]],
        "tensor_parallel_size": case["tp"],
        "kv_cache_dtype": case["cache"],
        "enforce_eager": not case["graphs"],
        "gpu_memory_utilization": share,
        "kv_cache_memory_bytes": CACHE_BYTES,
        "max_model_len": LONGEST,
        # Below the longest prompt: it is prefilled in chunks.
        "max_num_batched_tokens": 1024,
        "max_num_seqs": 64,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        # Every captured size has kernels of its own to be compiled.
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]},
        "tokenizer_mode": "hf",
        "limit_mm_per_prompt": {"image": 0, "video": 0},
    }
    if case["cache"] == "fp8":
        made["attention_config"] = {"mla_prefill_backend": "TRTLLM_RAGGED", "use_prefill_query_quantization": True}
        made["attention_backend"] = "FLASHINFER_MLA"
    if case["drafter"] == "mtp":
        made["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 1}
    elif case["drafter"]:
        made["speculative_config"] = {
            "method": "dspark",
            "model": folders[f"drafter-{case['drafter']}"],
            "num_speculative_tokens": tiny_k3.DRAFT_TOKENS,
        }
    return made


def merged(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Both, theirs where they differ, dictionaries inside likewise."""
    made = dict(ours)
    for name, value in theirs.items():
        both = isinstance(value, dict) and isinstance(made.get(name), dict)
        made[name] = merged(made[name], value) if both else value
    return made


def log_probs(outputs: list[Any], vocabulary: int) -> list[np.ndarray]:
    """Of each prompt float32 [tokens - 1, vocabulary]: log-probabilities of what follows each token but the last."""
    made = []
    for output in outputs:
        rows = output.prompt_logprobs[1:]
        table = np.full((len(rows), vocabulary), -np.inf, np.float32)
        for i, row in enumerate(rows):
            for token, entry in row.items():
                table[i, token] = entry.logprob
        made.append(table)
    return made


def worst(first: list[np.ndarray], second: list[np.ndarray]) -> float:
    """The largest difference between two scores of the same prompts, nats."""
    return max(float(np.abs(a - b).max(initial=0.0)) for a, b in zip(first, second, strict=True))


def generated(outputs: list[Any]) -> list[dict[str, Any]]:
    """Of each prompt the tokens, and the log-probability of each."""
    made = []
    for output in outputs:
        best = output.outputs[0]
        values = [row[token].logprob for row, token in zip(best.logprobs, best.token_ids, strict=True)]
        made.append({"tokens": list(best.token_ids), "logprobs": values})
    return made


def counters(llm: Any) -> dict[str, float]:
    """vLLM's counters since the engine started, by name."""
    return {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}


def acceptance_length(before: dict[str, float], after: dict[str, float]) -> float | None:
    """Tokens a step between two readings of the counters; None if nothing was drafted."""
    drafts, accepted = (
        after.get(name, 0) - before.get(name, 0)
        for name in ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
    )
    return 1 + accepted / drafts if drafts else None


def rates(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Tokens a second, of prompts read and of tokens generated after the first: medians, and those of each round.

    ``rounds`` hold seconds: ``prefill_s`` of the long prompts, ``first_token_s`` of the short ones, ``generate_s`` of
    the short ones with all that is generated.  The first token's median stands for every round: a machine that
    hesitates for the moment in which one of them is timed takes nothing else away.
    """
    first = statistics.median(each["first_token_s"] for each in rounds)
    shortest = min(each["generate_s"] for each in rounds)
    if shortest <= first:
        raise RuntimeError(
            f"{TIMED_GENERATED} tokens took {shortest:.3f} s, and the first alone {first:.3f} s as a rule"
        )
    made = [
        each
        | {
            "prefill_tokens_s": TIMED_PROMPTS * TIMED_LENGTH / each["prefill_s"],
            "decode_tokens_s": TIMED_PROMPTS * (TIMED_GENERATED - 1) / (each["generate_s"] - first),
        }
        for each in rounds
    ]
    names = ("prefill_tokens_s", "decode_tokens_s")
    return {name: statistics.median(each[name] for each in made) for name in names} | {"rounds": made}


def throughput(llm: Any, vocabulary: int, reserved: int, turns: Turns) -> dict[str, Any]:
    """What ``rates`` makes of TIMED_ROUNDS rounds.

    Between its rounds the engine gives way to others that are timed, so that a machine that is slow for a while is so
    for all of them.
    """
    from vllm import SamplingParams

    seeds = itertools.count(1)

    def seconds(length: int, tokens: int) -> float:
        # Other prompts each time: none comes from the prefix cache.
        batch = prompts.many(TIMED_PROMPTS, length, vocabulary, reserved=reserved, seed=next(seeds))
        start = time.perf_counter()
        llm.generate(
            [{"prompt_token_ids": p} for p in batch],
            SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        return time.perf_counter() - start

    def measured() -> dict[str, float]:
        return {
            "prefill_s": seconds(TIMED_LENGTH, 1),
            "first_token_s": seconds(TIMED_SHORT, 1),
            "generate_s": seconds(TIMED_SHORT, TIMED_GENERATED),
        }

    with turns.alone():
        measured()  # may compile kernels
    rounds = []
    for _ in range(TIMED_ROUNDS):
        with turns.alone():
            seconds(TIMED_SHORT, TIMED_SHORT)  # the engine was idle
            rounds.append(measured())
    return rates(rounds)


def run(job: dict[str, Any], results: Results, turns: Turns) -> None:
    from vllm import LLM, SamplingParams

    case, vocabulary, reserved = job["case"], job["vocabulary"], job["reserved"]
    arguments = merged(engine_arguments(case, job["folders"], job["share"]), job.get("arguments", {}))
    start = time.perf_counter()
    try:
        llm = LLM(**arguments, max_logprobs=-1, disable_log_stats=False)
    except BaseException as e:
        results.add(loads=False, load_error=f"{type(e).__name__}: {e}"[:2000], load_s=time.perf_counter() - start)
        raise
    results.add(loads=True, load_s=round(time.perf_counter() - start, 1))

    batch = [{"prompt_token_ids": p} for p in prompts.prompts(vocabulary, reserved=reserved)]
    scoring = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, detokenize=False)
    greedy = SamplingParams(max_tokens=prompts.GENERATED, temperature=0, logprobs=0, ignore_eos=True, detokenize=False)
    tables = Path(job["tables"])

    def score() -> list[np.ndarray]:
        return log_probs(llm.generate(batch, scoring, use_tqdm=False), vocabulary)

    with results.part("score"):
        first = score()
        np.savez(tables, *first)
    with results.part("generate"):
        before = counters(llm)
        texts = generated(llm.generate(batch, greedy, use_tqdm=False))
        results.add(generated=texts, acceptance_length=acceptance_length(before, counters(llm)))
    with results.part("cached"):
        again = generated(llm.generate(batch, greedy, use_tqdm=False))
        results.add(generated_again=again, prefix_hits=counters(llm).get("vllm:prefix_cache_hits"))
    with results.part("repeat"):
        # Batches are not made up the same way twice, and round differently: that is not the reload's doing.
        llm.reset_prefix_cache()
        results.add(repeat_worst=worst(first, score()))
    with results.part("reload"):
        llm.collective_rpc("reload_weights")
        llm.reset_prefix_cache()
        second = score()
        np.savez(tables.with_suffix(".reloaded.npz"), *second)
        results.add(
            reload_worst=worst(first, second), generated_reloaded=generated(llm.generate(batch, greedy, use_tqdm=False))
        )
    if case["timed"]:
        turns.rest()
        with results.part("throughput"):
            results.add(throughput=throughput(llm, vocabulary, reserved, turns))
        # An engine's end takes a while, and is not to be timed in another.
        turns.share()


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    results = Results(Path(job["results"]))
    turns = Turns(Path(job["lock"]))
    turns.share()
    run(job, results, turns)
    results.add(finished=True)


if __name__ == "__main__":
    main()
