"""How many tokens a step is expected to give, learnt over the cell from what was accepted."""

from __future__ import annotations

from collections.abc import Sequence

_PRIOR_STEPS = 12.0  # steps that the prior counts for at depth 1
_CHAIN_PRIOR = 0.6  # accepted at a depth given the depth before, when the model card says nothing
_TREE_POWER = 1.35  # 1 - (1 - chain)^power: how much more often some child matches than the first
_MEMORY = 4000.0  # steps after which old counts are halved


class Acceptance:
    """Acceptance by depth of one tree mode.

    Plans that only take the rank-0 path (chain prefixes of a tree with a spine) share their counts:
    a prefix of n nodes says nothing about depths from n on and all about those before. Any other
    number of nodes has counts of its own.

    Args:
        card: probability that depth 1, 2, .. of a chain is accepted given that all before it were,
            as the draft's model card has it; empty when unknown.
        chain: the nodes up to which a plan is a chain.
    """

    def __init__(self, block_size: int, card: Sequence[float], chain: int) -> None:
        self._depths = block_size - 1
        self._chain = chain
        self._prior = _prior(card, self._depths)
        self._counts: dict[int, list[float]] = {}
        self._expected: dict[int, float] = {}

    def observe(self, nodes: int, accepted: int) -> None:
        """A slot that was planned `nodes` rows walked over `accepted` drafts; counts from the next
        `refresh` on."""
        counts = self._counts.setdefault(nodes, [0.0] * (self._depths + 1))
        counts[min(accepted, self._depths)] += 1

    def refresh(self) -> None:
        """What was observed counts from now on; old counts fade."""
        self._expected.clear()
        for counts in self._counts.values():
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
        chain = nodes <= self._chain
        own = [n for n in self._counts if n <= self._chain] if chain else [nodes]
        other = [n for n in self._counts if (n <= self._chain) != chain]
        # What the other kind of plan saw is a better prior than the card: both guess the same text.
        card = self._prior if not chain else [_in_tree(chance) for chance in self._prior]
        power = 1 / _TREE_POWER if chain else _TREE_POWER
        prior = [1.0 - (1.0 - chance) ** power for chance in self._chances(other, card)]
        total, reach = 1.0, 1.0
        for chance in self._chances(own, prior)[: nodes - 1]:
            reach *= chance
            total += reach
        return total

    def _chances(self, pool: Sequence[int], prior: Sequence[float]) -> list[float]:
        """Chance of each depth given the one before: `prior` and the counts of `pool` together.

        Where the counts differ from the prior at one depth, so does the expectation of the next (by
        the same odds): text that is easy to guess is so at depths that were not tried yet.
        """
        chances: list[float] = []
        reach = odds = 1.0
        for depth, plain in enumerate(prior, 1):
            expected = plain * odds / (plain * odds + 1 - plain)
            weight = max(_PRIOR_STEPS * reach, 1.0)
            counts = [self._counts[n] for n in pool if n > depth and n in self._counts]
            tried = sum(sum(count[depth - 1 :]) for count in counts)
            passed = sum(sum(count[depth:]) for count in counts)
            chances.append((weight * expected + passed) / (weight + tried))
            reach *= chances[-1]
            chance = min(max(chances[-1], 0.01), 0.99)
            odds = chance * (1 - plain) / ((1 - chance) * plain)
        return chances


def _in_tree(chance: float) -> float:
    """Chance that some child matches, when the first one does with `chance`."""
    return float(1.0 - (1.0 - chance) ** _TREE_POWER)


def _prior(card: Sequence[float], depths: int) -> list[float]:
    """The card's chances, none of them certain, the last of them for all that it does not name."""
    chances = [min(max(chance, 0.05), 0.98) for chance in card[:depths]]
    last = chances[-1] if chances else _CHAIN_PRIOR
    return chances + [last] * (depths - len(chances))
