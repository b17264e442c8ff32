"""GPU time without the host's part in it."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

BATCH = 20


def machine() -> dict[str, str]:
    """What measures."""
    import vllm

    return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "vllm": vllm.__version__}


def captured(calls: Sequence[Callable[[], Any]], number: int) -> torch.cuda.CUDAGraph:
    """A CUDA graph of so many calls, in turns, which ran before and has been replayed once."""
    for call in (*calls, *calls):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in itertools.islice(itertools.cycle(calls), number):
            call()
    graph.replay()
    return graph


def graph_time(calls: Sequence[Callable[[], Any]], repeats: int) -> float:
    """Microseconds of one call, the median over replays of a CUDA graph of BATCH of them, in turns."""
    graph = captured(calls, BATCH)
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / BATCH)
    return statistics.median(times)
