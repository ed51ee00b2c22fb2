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
"""As the one above: below the first what the slower pace takes is not known; beyond the second
other work was in between."""

LEARNT_FROM, STEADY = 9, 1.04
"""Looks whose median is the slower pace: of launches one in ten leaves the faster. The last but one
of them by size takes at most so much of the median, or a neighbour is at work: what is learnt
beside one is too much, and the slower pace would pass as the faster later."""

PATIENCE = 16
"""Most disturbed looks of a call: a neighbour that loads goes on for longer, and so do clocks that
were lowered."""

PER_CALL = 24
"""Most works launched in a call, 0.4 ms each: gateways give a session that begins 50 ms."""

TRIES = 250
"""Most works launched in a search. Of searches on an H200 most took fewer than 30, some more than
100."""

MOST_PASSED = 1024
"""Most chances that are let pass after searches that found nothing."""


class GapKeeper:
    """Decides from what looks show whether to change the pace.

    Attributes:
        slower: us of a kernel at the slower pace, 0 while that is not known.
        faster: us of the last look that showed the faster one, 0 before.
        kept: whether the last call ended with the faster one.
    """

    def __init__(self) -> None:
        self.slower = self.faster = 0.0
        self.kept = False
        self._open = False  # whether the faster one may come: it was there, or a change was made
        self._changes = 0  # of the search that goes on
        self._pass, self._passes = 0, 1

    def keep(self, look: Callable[[], float], change: Callable[[], None]) -> bool:
        """Looks, and changes the pace until it is the faster of two.

        Nothing is changed before two looks showed the slower one. A call ends after some
        `PER_CALL` changes, and the next one goes on with the search. What the slower pace takes is
        learnt anew where a look shows the faster one after one of the slower with no change in
        between, as when a neighbour leaves; after `PATIENCE` disturbed looks; and after `TRIES`
        changes in vain, both may have become slower. Then ever more calls do nothing.

        Args:
            look: gives the us that a kernel takes.
            change: does what may change that.

        Returns whether there is nothing more to do for now.
        """
        self.kept = False
        if self._pass:
            self._pass -= 1
            return True
        over = self._search(look, change)
        if self.kept:
            self._changes, self._passes = 0, 1
        elif self._changes >= TRIES:
            self._changes, self.slower = 0, 0.0
            self._pass, self._passes = self._passes, min(2 * self._passes, MOST_PASSED)
            return True
        return over

    def _search(self, look: Callable[[], float], change: Callable[[], None]) -> bool:
        """A call's part of a search; whether it came to an end."""
        most = min(self._changes + PER_CALL, TRIES)
        slow = disturbed = 0
        while self._changes < most:
            if not self.slower and not self._learn(look, change):
                continue
            us = look()
            if us > DISTURBED * self.slower:
                disturbed += 1
                if disturbed == PATIENCE:
                    self.slower = 0.0
                    return True
            elif us > FASTER * self.slower:
                slow += 1
                if slow > 1:
                    change()
                    self._changes += 1
                    self._open = True
            elif us < IMPLAUSIBLE * self.slower or not self._open:
                self.slower = 0.0
            else:
                self.faster, self.kept = us, True
                return True
        return False

    def _learn(self, look: Callable[[], float], change: Callable[[], None]) -> bool:
        """Finds out what the slower pace is; False when the looks differ too much."""
        seen = []
        for _ in range(LEARNT_FROM):
            change()
            seen.append(look())
        self._changes += LEARNT_FROM
        median = statistics.median(seen)
        if sorted(seen)[-2] > STEADY * median:
            return False
        self.slower, self._open = median, seen[-1] <= FASTER * median
        return True


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
        while not self.keep():
            pass
        if self.keeper.kept:
            log.info(
                "a graph's kernels take %.2f us, not %.2f", self.keeper.faster, self.keeper.slower
            )
        else:
            log.info("a graph's kernels show no faster pace than the one they have, as yet")

    def keep(self) -> bool:
        """See `GapKeeper.keep`. To be called when the stream is empty: it waits for its works."""
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
