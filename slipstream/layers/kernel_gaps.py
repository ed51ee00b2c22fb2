"""The gaps between the kernels of a graph, kept short.

The GPU runs the kernels of a graph at one of two paces: a chain of additions takes 0.94 us for
each, or 1.11, and as much is added to every other kernel of every process there (an H200, driver
580). Which one it is stays the same until a kernel is launched outside of a graph, by whatever
process: most such launches leave the slower pace behind, one in ten or twenty the faster; graphs
and copies change nothing. The cause is not known; benchmarks/README.md says what was tried.

So the pace is looked at when the GPU has nothing to do, and while it is the slower one, works of no
use are launched until a look shows the faster.
"""

from __future__ import annotations

import logging
import random
import statistics
from collections.abc import Callable

import torch

from slipstream.layers.graphs import Graphs

log = logging.getLogger(__name__)

CHAIN = 64
"""Kernels of a look; it takes as long as a hundredth of a large model's step."""

LOOKS = 3
"""The least of so many counts: another process may be at work, which one of them will miss."""

FASTER = 0.92
"""Looks at the faster pace take 0.79 to 0.9 of what those at the slower one mostly take, under MPS,
and those at the slower one 0.95 at least."""

IMPLAUSIBLE, DISTURBED = 0.7, 1.3
"""As the one above: below the first it is not known what the slower pace takes; beyond the second
other work was in between."""

LEARNT_FROM = 7
"""Looks whose median is the slower pace: of launches one in ten leaves the faster."""

PATIENCE = 16
"""Most disturbed looks of a search: a neighbour that loads goes on for longer."""

TRIES = 250
"""Most works launched in a row, 0.4 ms each. Of searches on an H200 most took fewer than 30, some
more than 100."""

MOST_PASSED = 1024
"""Most chances that are let pass after searches that found nothing."""


class GapKeeper:
    """Decides from what looks show whether to change the pace.

    Attributes:
        slower: us of a kernel at the slower pace, 0 while that is not known.
        faster: us of the last look that showed the faster one, 0 before.
    """

    def __init__(self) -> None:
        self.slower = self.faster = 0.0
        self._pass, self._passes = 0, 1

    def keep(self, look: Callable[[], float], change: Callable[[], None]) -> bool:
        """Looks, and changes the pace until it is the faster of two; whether it is now.

        Of looks that are disturbed there may be `PATIENCE`, and it takes two to see the slower pace
        before anything is changed. After `TRIES` changes in vain it is forgotten what the slower
        one is, both may have become slower, and ever more calls do nothing.

        Args:
            look: gives the us that a kernel takes.
            change: does what may change that.
        """
        if self._pass:
            self._pass -= 1
            return False
        changes = disturbed = looks = 0
        while changes < TRIES:
            if not self.slower:
                changes += self._learn(look, change)
            us = look()
            looks += 1
            if us > DISTURBED * self.slower:
                disturbed += 1
                if disturbed == PATIENCE:
                    return False
            elif us < IMPLAUSIBLE * self.slower:
                self.slower = 0.0
            elif us <= FASTER * self.slower:
                self.faster, self._passes = us, 1
                return True
            elif looks > 1:
                change()
                changes += 1
        self.slower = 0.0
        self._pass, self._passes = self._passes, min(2 * self._passes, MOST_PASSED)
        return False

    def _learn(self, look: Callable[[], float], change: Callable[[], None]) -> int:
        """Finds out what the slower pace is; returns the number of changes."""
        seen = []
        for _ in range(LEARNT_FROM):
            change()
            seen.append(look())
        self.slower = statistics.median(seen)
        return LEARNT_FROM


class KernelGaps:
    """A `GapKeeper` at work on the GPU whose work is recorded with `graphs`.

    Made last of all that is loaded, since it begins at once; its calls come from one thread.
    """

    def __init__(self, graphs: Graphs) -> None:
        device = graphs.device
        self.keeper = GapKeeper()
        self._graphs, self._random = graphs, random.Random(0)
        self._rows, self._weight, self._out = (
            torch.zeros(shape, dtype=torch.bfloat16, device=device)
            for shape in ((16, 4096), (4096, 1024), (16, 1024))
        )
        self._chained, self._number = (torch.zeros(1024, device=device) for _ in range(2))
        self._began, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        usual = torch.cuda.default_stream(device)
        other = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._works: list[tuple[torch.cuda.Stream, Callable[[], None], int]] = [
            (stream, work, times)
            for stream in (usual, other)
            for work, most in ((self._multiply, 4), (self._add, 8))
            for times in (1, most)
        ]
        torch.cuda.synchronize(device)
        self._chain = graphs.capture(self._add_in_turn)
        for work in self._works:  # what a first launch loads
            self._launch(*work)
        if self.keep():
            log.info(
                "a graph's kernels take %.2f us, not %.2f", self.keeper.faster, self.keeper.slower
            )
        else:
            log.info("a graph's kernels show no faster pace than the one they have, as yet")

    def keep(self) -> bool:
        """See `GapKeeper.keep`. To be called when the streams are empty: it waits for its works."""
        with self._graphs.on_stream():
            return self.keeper.keep(self._look, self._change)

    def _look(self) -> float:
        """us of a kernel, on the current stream."""
        return min(self._look_once() for _ in range(LOOKS)) / CHAIN

    def _look_once(self) -> float:
        self._began.record()
        self._chain()
        self._ended.record()
        self._ended.synchronize()
        return float(self._began.elapsed_time(self._ended)) * 1e3

    def _change(self) -> None:
        self._launch(*self._random.choice(self._works))

    @torch.inference_mode()
    def _launch(self, stream: torch.cuda.Stream, work: Callable[[], None], times: int) -> None:
        with torch.cuda.stream(stream):
            for _ in range(times):
                work()
        stream.synchronize()

    def _multiply(self) -> None:
        torch.mm(self._rows, self._weight, out=self._out)

    def _add(self) -> None:
        self._number.add_(1)

    @torch.inference_mode()
    def _add_in_turn(self) -> None:
        for _ in range(CHAIN):
            self._chained.add_(1)
