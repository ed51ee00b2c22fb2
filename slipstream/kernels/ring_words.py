"""The words of the rings, `slipstream.handoff.layout`, as kernels need them."""

from __future__ import annotations

import triton.language as tl

from slipstream.handoff.layout import (
    HEAD_INTS,
    RECORD_INTS,
    Head,
    Header,
    ProposalHeader,
    Record,
)

RECORD_WORDS = tl.constexpr(RECORD_INTS)
HEAD_WORDS = tl.constexpr(HEAD_INTS)

HEADER_STEP = tl.constexpr(int(Header.STEP))
HEADER_COUNT = tl.constexpr(int(Header.COUNT))
HEADER_BEGAN = tl.constexpr(int(Header.BEGAN))
HEADER_ENDED = tl.constexpr(int(Header.ENDED))

RECORD_SLOT = tl.constexpr(int(Record.SLOT))
RECORD_EPOCH = tl.constexpr(int(Record.EPOCH))
RECORD_FIRST = tl.constexpr(int(Record.FIRST))
RECORD_COUNT = tl.constexpr(int(Record.COUNT))
RECORD_ANCHOR = tl.constexpr(int(Record.ANCHOR))
RECORD_CAUGHT_UP = tl.constexpr(int(Record.CAUGHT_UP))

HEAD_SLOT = tl.constexpr(int(Head.SLOT))
HEAD_EPOCH = tl.constexpr(int(Head.EPOCH))
HEAD_NODES = tl.constexpr(int(Head.NODES))

PROPOSAL_STEP = tl.constexpr(int(ProposalHeader.STEP))
PROPOSAL_COUNT = tl.constexpr(int(ProposalHeader.COUNT))
PROPOSAL_BEGAN = tl.constexpr(int(ProposalHeader.BEGAN))
PROPOSAL_ENDED = tl.constexpr(int(ProposalHeader.ENDED))
