"""How long calls take, by name."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Watch:
    """Keeps the time of calls that begin while it is `on`. Any thread."""

    def __init__(self) -> None:
        self.on = False
        self.calls: list[tuple[float, str]] = []

    def wrap(self, thing: Any, *methods: str) -> None:
        """Every call of these methods of `thing` is timed from now on."""
        for name in methods:
            setattr(thing, name, self.timed(getattr(thing, name), lambda *_, name=name: name))

    def timed(self, call: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
        """`call`, timed under the name that `name` gives its arguments."""

        @functools.wraps(call)
        def run(*args: Any, **more: Any) -> Any:
            with self.call(name(*args)):
                return call(*args, **more)

        return run

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Times the block."""
        on, began = self.on, time.perf_counter()
        try:
            yield
        finally:
            if on:
                self.calls.append((time.perf_counter() - began, name))

    def slowest(self) -> tuple[float, str]:
        """Seconds and name of the slowest call; says how many there were and which took longest."""
        worst: dict[str, float] = {}
        for seconds, name in self.calls:
            worst[name] = max(worst.get(name, 0.0), seconds)
        by_time = sorted(worst.items(), key=lambda item: -item[1])
        said = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in by_time)
        print(f"{len(self.calls)} calls beside a parked stream, slowest of each: {said}")
        return max(self.calls)
