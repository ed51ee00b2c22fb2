"""How many tokens a step is expected to give, learnt over the cell from what was accepted."""

from __future__ import annotations

from collections.abc import Sequence

_PRIOR_STEPS = 24.0  # steps that the prior counts for at depth 1
_CHAIN_PRIOR = 0.6  # accepted at a depth given the depth before, when the model card says nothing
_TREE_POWER = 1.35  # 1 - (1 - chain)^power: how much more often some child matches than the first
_REFRESH = 16  # steps between two looks at the counts
_MEMORY = 4000.0  # steps after which old counts are halved


class Acceptance:
    """Acceptance by depth of one tree mode.

    Plans that only take the rank-0 path (chain prefixes of a tree with a spine) share their counts:
    a prefix of n nodes says nothing about depths from n on and all about those before. Any other
    number of nodes has counts of its own.

    Args:
        card: probability that depth 1, 2, .. of a chain is accepted, as the draft's model card has
            it; empty when unknown.
        chain: the nodes up to which a plan is a chain.
    """

    def __init__(self, block_size: int, card: Sequence[float], chain: int) -> None:
        self._depths = block_size - 1
        self._chain = chain
        self._prior = _conditional(card, self._depths)
        self._counts: dict[int, list[float]] = {}
        self._expected: dict[int, float] = {}
        self._fresh = 0

    def observe(self, nodes: int, accepted: int) -> None:
        """A drafted slot was planned `nodes` rows and `accepted` drafts lay on the walked path."""
        counts = self._counts.setdefault(nodes, [0.0] * (self._depths + 1))
        counts[min(accepted, self._depths)] += 1
        self._fresh += 1
        if self._fresh >= _REFRESH:
            self._fresh = 0
            self._expected.clear()
            if sum(counts) > _MEMORY:
                counts[:] = [count / 2 for count in counts]

    def expected(self, nodes: int) -> float:
        """Tokens that a step of `nodes` rows gives, the bonus included."""
        if nodes <= 1 or self._depths <= 0:
            return 1.0
        known = self._expected.get(nodes)
        if known is None:
            known = self._expected[nodes] = self._estimate(nodes)
        return known

    def _estimate(self, nodes: int) -> float:
        if nodes <= self._chain:
            pool = [n for n in self._counts if n <= self._chain]
        else:
            pool = [nodes] if nodes in self._counts else []
        total, reach = 1.0, 1.0
        for depth in range(1, min(nodes - 1, self._depths) + 1):
            prior = self._prior[depth - 1]
            if nodes > self._chain:
                prior = 1 - (1 - prior) ** _TREE_POWER
            weight = max(_PRIOR_STEPS * reach, 1.0)
            tried = sum(sum(self._counts[n][depth - 1 :]) for n in pool if n > depth)
            passed = sum(sum(self._counts[n][depth:]) for n in pool if n > depth)
            reach *= (weight * prior + passed) / (weight + tried)
            total += reach
        return total


def _conditional(card: Sequence[float], depths: int) -> list[float]:
    """Probability of each depth given the one before, from the model card's running ones."""
    chances: list[float] = []
    before = 1.0
    for reach in card[:depths]:
        chances.append(min(max(reach / before, 0.05), 0.98))
        before = max(min(reach, before), 1e-3)
    last = chances[-1] if chances else _CHAIN_PRIOR
    return chances + [last] * (depths - len(chances))
