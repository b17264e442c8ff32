"""Many requests at once against a server: no answer may be wrong or lost.

    python -m engine.load JOB.json

Every client keeps asking from one list of prompts.  An answer is compared with the one that the same server gave when
it was asked alone: equal, or different from a token on that was among the likeliest there (other batches round
differently), and nowhere further off than rounding explains.  Meanwhile a client is killed in the middle of its
streams, and the weights are reloaded.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from engine import prompts
from engine.server import NAME, Server, serving
from engine.turns import Turns

CLIENTS, PROMPTS, LENGTH, TOKENS = 64, 24, 200, 32
CANDIDATES = 5
# What two roundings of one log-probability may differ by, nats: twice what each may be off (tests/e2e/README.md).
WORST, MEAN = 1.5, 0.25
# Over fewer tokens than this, a mean says little.
FEW = 8


async def ask(client: Any, prompt: list[int]) -> dict[str, Any]:
    answer = await client.completions.create(
        model=NAME,
        prompt=prompt,
        max_tokens=TOKENS,
        temperature=0,
        logprobs=CANDIDATES,
        extra_body={"ignore_eos": True, "return_token_ids": True, "return_tokens_as_token_ids": True},
    )
    choice = answer.choices[0]
    return {
        "tokens": list(choice.token_ids),
        "logprobs": list(choice.logprobs.token_logprobs),
        "top": [
            {int(name.removeprefix("token_id:")): value for name, value in row.items()}
            for row in choice.logprobs.top_logprobs
        ],
        "reason": choice.finish_reason,
    }


def verdict(answer: dict[str, Any], alone: dict[str, Any]) -> str:
    """``same``, ``near`` (from a token on that was as likely, for all that rounding knows), ``lost`` or ``wrong``."""
    if len(answer["tokens"]) != len(alone["tokens"]) or answer["reason"] != alone["reason"]:
        return "lost"
    off: list[float] = []
    word = "same"
    for ours, theirs, value, top in zip(
        answer["tokens"], alone["tokens"], answer["logprobs"], alone["top"], strict=True
    ):
        if ours not in top or top[theirs] - top[ours] > WORST:
            return "wrong"
        off.append(abs(value - top[ours]))
        if ours != theirs:
            # What follows answers another text.
            word = "near"
            break
    wrong = max(off) > WORST or (len(off) >= FEW and sum(off) / len(off) > MEAN)
    return "wrong" if wrong else word


async def one_client(
    client: Any, number: int, batch: list[list[int]], alone: list[Any], until: float
) -> dict[str, int]:
    counts: dict[str, int] = {}
    turn = number
    while time.monotonic() < until:
        which = turn % len(batch)
        turn += 1
        try:
            word = verdict(await ask(client, batch[which]), alone[which])
        except Exception as e:
            word = f"error: {type(e).__name__}: {e}"[:200]
        counts[word] = counts.get(word, 0) + 1
    return counts


async def disturb(server: Server, victim: list[str], seconds: float) -> dict[str, Any]:
    """A client killed after a third of the time, a reload of the weights after a half."""
    await asyncio.sleep(seconds / 3)
    process = subprocess.Popen(victim, stdout=subprocess.PIPE)
    assert process.stdout is not None
    streaming = await asyncio.to_thread(process.stdout.readline)
    process.send_signal(signal.SIGKILL)
    process.wait()
    await asyncio.sleep(seconds / 6)
    start = time.monotonic()
    await asyncio.to_thread(server.call, "reload_weights")
    return {"killed_while_streaming": streaming == b"streaming\n", "reload_s": round(time.monotonic() - start, 2)}


async def run(job: dict[str, Any], server: Server) -> dict[str, Any]:
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
    batch = prompts.many(PROMPTS, LENGTH, job["vocabulary"], reserved=job["reserved"], seed=11)
    alone = [await ask(client, prompt) for prompt in batch]
    chat = await client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "hello"}], max_tokens=8, temperature=0
    )
    seconds = job["seconds"]
    until = time.monotonic() + seconds
    victim = [sys.executable, "-m", "engine.load", "victim", f"{server.url}/v1", json.dumps(batch[0])]
    *counts, disturbance = await asyncio.gather(
        *(one_client(client, number, batch, alone, until) for number in range(CLIENTS)),
        disturb(server, victim, seconds),
    )
    after = [verdict(await ask(client, prompt), other) for prompt, other in zip(batch, alone, strict=True)]
    total: dict[str, int] = {}
    for count in [*counts, {word: after.count(word) for word in after}]:
        for word, number in count.items():
            total[word] = total.get(word, 0) + number
    return {
        "clients": CLIENTS,
        "seconds": seconds,
        "answers": total,
        "chat_tokens": chat.usage.completion_tokens if chat.usage else None,
        "alone": alone,
        **disturbance,
    }


def be_victim(url: str, prompt: list[int]) -> None:
    """Stream several answers at once until killed."""
    from openai import AsyncOpenAI

    async def stream(client: Any) -> None:
        chunks = await client.completions.create(
            model=NAME, prompt=prompt, max_tokens=1500, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in chunks:
            print("streaming", flush=True)

    async def streams() -> None:
        client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        await asyncio.gather(*(stream(client) for _ in range(8)))

    asyncio.run(streams())


def main() -> None:
    if sys.argv[1] == "victim":
        be_victim(sys.argv[2], json.loads(sys.argv[3]))
        return
    job = json.loads(Path(sys.argv[1]).read_text())
    results = Path(job["results"])
    Turns(Path(job["lock"])).share()
    start = time.monotonic()
    with serving(sys.executable, job["arguments"], job["gpus"], Path(job["server_log"])) as server:
        if not server.wait(job["limit"]):
            made: dict[str, Any] = {"starts": False}
        else:
            made = {"starts": True, "start_s": round(time.monotonic() - start, 1)} | asyncio.run(run(job, server))
            made["alive"] = server.process.poll() is None
    results.write_text(json.dumps(made))


if __name__ == "__main__":
    main()
