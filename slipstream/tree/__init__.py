"""Token trees: building, checking, masking and walking them. Pure Python; the reference for every
faster version.

A tree is flat arrays (`Tree`); node 0 is the anchor and a parent's index is smaller than its
children's. The draft builds one per slot and step (`TreeSpec`, `build_tree`); the target treats it
as input (`repair`), derives the mask from its shape (`ancestor_bits`, `split_words`), follows its
own draws through it (`walk`) and commits the result (`cut`).
"""

from slipstream.tree.accept import Finish, Walk, cut, walk
from slipstream.tree.arrays import Tree, ancestor_bits, links, split_words
from slipstream.tree.build import build_tree, candidates_needed
from slipstream.tree.chain import build_chain
from slipstream.tree.repair import repair
from slipstream.tree.spec import (
    TreeMode,
    TreeSpec,
    needed_budget,
    parse_speculative_config,
    resolve_spec,
)

__all__ = [
    "Finish",
    "Tree",
    "TreeMode",
    "TreeSpec",
    "Walk",
    "ancestor_bits",
    "build_chain",
    "build_tree",
    "candidates_needed",
    "cut",
    "links",
    "needed_budget",
    "parse_speculative_config",
    "repair",
    "resolve_spec",
    "split_words",
    "walk",
]
