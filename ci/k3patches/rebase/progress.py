"""Tell what goes on, and take the time: a moving line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


class Progress:
    """``seconds`` collects (step, seconds)."""

    def __init__(self, seconds: list[tuple[str, float]]) -> None:
        self.console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
        self.seconds = seconds

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        start, done = time.monotonic(), False
        try:
            if self.console.is_terminal:
                with self.console.status(f"{name} ..."):
                    yield
            else:
                yield
            done = True
        finally:
            spent = round(time.monotonic() - start, 1)
            self.seconds.append((name, spent))
            self.say(f"{name}: {'' if done else 'stopped after '}{spent} s")

    def say(self, text: str) -> None:
        self.console.print(text)
