"""How many nodes a decode plan verifies per slot.

Among 1, the chain prefixes 4 and 8, the block and the admitted tree: the number with the most
expected tokens per ms of the whole step. Times start from what the servers measured at start-up and
are corrected by the measured time between results; acceptance is learnt over the cell. Drafting
must pay: it starts only for a clear gain, and stops when plain decoding is as good.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.acceptance import Acceptance
from gateway.costs import StepCosts

CHAIN_PREFIXES = (4, 8)
START_GAIN = 1.05  # drafting begins when it is expected to be this much better than plain
SWITCH_GAIN = 1.03  # another number of nodes is taken for this much
PROBE = 64  # steps between two of another number than the choice
PROBE_LOSS = 0.02  # share of the speed that probing may cost
_LEARNING = 8  # steps between two plain ones while those were hardly measured
_ENOUGH = 6  # measured steps after which a time is known
_REFRESH = 8  # plans between two looks at what was accepted
_SLOWEST_EWMA = 0.06


@dataclass(slots=True)
class _Ratio:
    """Measured over expected time of a step."""

    value: float = 1.0
    samples: int = 0

    def observe(self, sample: float) -> None:
        # A hiccup of the machine must not decide: samples are cut at 3 x what is known.
        sample = min(sample, 3 * self.value) if self.samples >= _ENOUGH else sample
        self.samples += 1
        self.value += (sample - self.value) * max(_SLOWEST_EWMA, 1 / self.samples)


Key = tuple[int, bool, int]
"""Nodes, ping-pong or not, bucket of the number of slots (powers of two)."""


def candidates(budget: int, block_size: int, max_nodes: int) -> tuple[int, ...]:
    """The numbers to choose from, rising; the last is the whole tree."""
    whole = max(min(budget, max_nodes), 1)
    smaller = {1, *CHAIN_PREFIXES, block_size}
    return (*sorted(n for n in smaller if n < whole), whole)


class NodeChooser:
    """The choice for one cell; it learns from every step.

    Args:
        budget: nodes of the admitted tree, root included.
        pinned: always the whole tree.
    """

    def __init__(
        self,
        costs: StepCosts,
        acceptance: Acceptance,
        budget: int,
        block_size: int,
        max_nodes: int,
        pinned: bool,
    ) -> None:
        self.candidates = candidates(budget, block_size, max_nodes)
        self.pinned = pinned
        self._costs = costs
        self._acceptance = acceptance
        self._ratios: dict[Key, _Ratio] = {}
        self._expected_ms: dict[tuple[int, int, int, bool], float] = {}
        self._chosen: dict[tuple[bool, int], int] = {}
        self._since_probe = _LEARNING
        self._turn = 0
        self._choices = 0
        self._planned = 1

    def choose(self, drafted: int, plain: int, paired: bool) -> int:
        """Nodes for each of `drafted` slots that can draft, beside `plain` ones that cannot."""
        if drafted == 0:
            return 1
        if self.pinned:
            return self.candidates[-1]
        if len(self.candidates) == 1:
            return 1
        self._choices += 1
        if self._choices % _REFRESH == 0:
            self._acceptance.refresh()
        place = (paired, (drafted + plain).bit_length())
        rates = {n: self.rate(n, drafted, plain, paired) for n in self.candidates}
        now = self._chosen.get(place, 1)
        best = max(self.candidates, key=rates.__getitem__)
        if best != now:
            gain = START_GAIN if now == 1 else 1.0 if best == 1 else SWITCH_GAIN
            if rates[best] > rates[now] * gain:
                now = best
            elif now != 1 and rates[1] >= rates[now]:
                now = 1
        self._chosen[place] = self._planned = now
        return self._probe(now, rates, (drafted, plain), paired)

    def current(self, slots: int, paired: bool) -> int:
        """The last choice for about this many slots."""
        if self.pinned:
            return self.candidates[-1]
        return self._chosen.get((paired, slots.bit_length()), 1)

    def rate(self, nodes: int, drafted: int, plain: int, paired: bool) -> float:
        """Expected tokens per ms."""
        tokens = drafted * self._acceptance.expected(nodes) + plain
        return tokens / self.step_ms(nodes, drafted, plain, paired)

    def step_ms(self, nodes: int, drafted: int, plain: int, paired: bool) -> float:
        """Expected time of a whole step, corrected by what was measured."""
        bucket = (drafted + plain).bit_length()
        return self._base(nodes, drafted, plain, paired) * self._ratio(nodes, paired, bucket)

    def observe_step(
        self, nodes: int, drafted: int, plain: int, paired: bool, period_ms: float
    ) -> None:
        """A step that followed another without a pause took `period_ms`."""
        nodes = nodes if drafted else 1
        key = (nodes, paired, (drafted + plain).bit_length())
        ratio = self._ratios.get(key)
        if ratio is None:
            ratio = self._ratios[key] = _Ratio()
        ratio.observe(period_ms / self._base(nodes, drafted, plain, paired))

    def observe_accepted(self, nodes: int, accepted: int) -> None:
        """A slot that was planned `nodes` > 1 rows walked over `accepted` drafts."""
        self._acceptance.observe(nodes, accepted)
        if nodes != self._planned:  # a probe: there are few, each must count at once
            self._acceptance.refresh()

    def _base(self, nodes: int, drafted: int, plain: int, paired: bool) -> float:
        key = (nodes, drafted, plain, paired)
        known = self._expected_ms.get(key)
        if known is None:
            known = self._expected_ms[key] = self._costs.step_ms(*key)
        return known

    def _ratio(self, nodes: int, paired: bool, bucket: int) -> float:
        """The ratio of these steps, or of the most similar ones that were measured, else 1."""
        own = self._ratios.get((nodes, paired, bucket))
        if own is not None:
            return own.value
        near = [
            ((was_paired != paired, abs(size - bucket), abs(n - nodes)), ratio.value)
            for (n, was_paired, size), ratio in self._ratios.items()
        ]
        return min(near)[1] if near else 1.0

    def _probe(
        self, now: int, rates: dict[int, float], slots: tuple[int, int], paired: bool
    ) -> int:
        """Now and then another number than the choice, so that its time and gain stay known."""
        self._since_probe += 1
        plain = self._ratios.get((1, paired, sum(slots).bit_length()))
        if now != 1 and (plain is None or plain.samples < _ENOUGH):
            if self._since_probe < _LEARNING:
                return now
            self._since_probe = 0
            return 1
        if self._since_probe < PROBE:
            return now
        others = [n for n in self.candidates if n != now]
        # Every other probe is of the most promising number, the rest take turns.
        if self._turn % 2 == 0:
            nodes = max(others, key=rates.__getitem__)
        else:
            nodes = others[self._turn // 2 % len(others)]
        slower = self.step_ms(nodes, *slots, paired) / self.step_ms(now, *slots, paired)
        # Steps of the choice that this one costs beyond what its tokens are worth.
        excess = slower * (1 - rates[nodes] / rates[now])
        if self._since_probe < excess / PROBE_LOSS:
            return now
        self._since_probe = 0
        self._turn += 1
        return nodes
