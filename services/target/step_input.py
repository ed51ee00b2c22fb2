"""What the host says of one step on a device: one packed copy.

Only what a plan says is in here: slots, rows, what a peer proposed, pages that were added. Lengths
and sampling state stay on the device (`services.target.device_slots`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from services.target.runner import DecodeEntry
from slipstream.handoff.layout import RING
from slipstream.layers.staging import Upload, packed

TABLE_UPDATES = 1024
"""Block table entries that one copy carries."""

TableUpdate = tuple[int, int, int]
"""(slot, index in its table, page)."""


class StepInput:
    """The packed buffer of steps of up to `rows` rows and `entries` entries.

    Views, all int32: `counts` (2,) entries and rows; `slots` (E,); `offsets` (E + 1,), the number
    of rows from the last entry on; `proposal_counts` (E,), 0 where nothing was proposed;
    `proposal_tokens` and `proposal_parents` (R,) at the entries' row offsets; `update_count` (1,)
    and `updates` (TABLE_UPDATES, 3). For prefill `ids` (R,) known tokens, `firsts` (E,) their first
    positions and `starts` (E,) the slots' lengths after it; in the place of a proposal `scored`
    (R,), the token that each row scores, and `scored_best` (R,), how many best ones are wanted
    beside it, -1 where it scores none. For first tokens `starts` and `anchors` (E,), and `picked`
    (E,), rows of the prefill.
    """

    def __init__(self, rows: int, entries: int, device: torch.device) -> None:
        spans, size = packed(
            {
                "counts": 2,
                "update_count": 1,
                "slots": entries,
                "offsets": entries + 1,
                "firsts": entries,
                "starts": entries,
                "anchors": entries,
                "picked": entries,
                "proposal_counts": entries,
                "proposal_tokens": rows,
                "proposal_parents": rows,
                "ids": rows,
                "updates": 3 * TABLE_UPDATES,
            }
        )
        self._spans = spans
        # A step may send more than once: pages that do not fit, first tokens, parts.
        self._upload = Upload((size,), torch.int32, device, 2 * RING)
        device_side = self._upload.device
        self.counts = device_side[spans["counts"]]
        self.slots = device_side[spans["slots"]]
        self.offsets = device_side[spans["offsets"]]
        self.firsts = device_side[spans["firsts"]]
        self.starts = device_side[spans["starts"]]
        self.anchors = device_side[spans["anchors"]]
        self.picked = device_side[spans["picked"]]
        self.proposal_counts = device_side[spans["proposal_counts"]]
        self.proposal_tokens = device_side[spans["proposal_tokens"]]
        self.proposal_parents = device_side[spans["proposal_parents"]]
        self.scored, self.scored_best = self.proposal_tokens, self.proposal_parents
        self.ids = device_side[spans["ids"]]
        self.update_count = device_side[spans["update_count"]]
        self.updates = device_side[spans["updates"]].view(TABLE_UPDATES, 3)

    def send_decode(self, entries: Sequence[DecodeEntry], updates: Sequence[TableUpdate]) -> None:
        """A decode step; a proposal of more than `nodes` nodes, or torn, is said to be none."""
        host = self._begin([e.slot for e in entries], [e.rows for e in entries], updates)
        tokens, parents = self._part(host, "proposal_tokens"), self._part(host, "proposal_parents")
        counts, at = self._part(host, "proposal_counts"), 0
        counts[: len(entries)] = 0
        for index, entry in enumerate(entries):
            if entry.proposed is not None:
                proposed_tokens, proposed_parents = entry.proposed
                count = len(proposed_tokens)
                if count == len(proposed_parents) and count <= entry.nodes:
                    counts[index] = count
                    tokens[at : at + count] = _clipped(proposed_tokens)
                    parents[at : at + count] = _clipped(proposed_parents)
            at += entry.rows
        self._upload.send()

    def send_prefill(
        self,
        slots: Sequence[int],
        firsts: Sequence[int],
        counts: Sequence[int],
        ids: Sequence[int],
        updates: Sequence[TableUpdate],
        scored: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Chunks of known tokens: `counts` rows of each slot from position `firsts` on.

        `scored`: of each row, the token that it scores and the best ones wanted; all or none.
        """
        host = self._begin(slots, counts, updates)
        self._part(host, "firsts")[: len(firsts)] = firsts
        self._part(host, "starts")[: len(firsts)] = np.add(firsts, counts)
        self._part(host, "ids")[: len(ids)] = ids
        if scored:
            tokens, best = zip(*scored, strict=True)
            self._part(host, "proposal_tokens")[: len(ids)] = tokens
            self._part(host, "proposal_parents")[: len(ids)] = best
            self._part(host, "proposal_parents")[len(ids) :] = -1
        self._upload.send()

    def send_first(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        anchors: Sequence[int],
        picked: Sequence[int],
    ) -> None:
        """First tokens: one row each, row `picked` of the prefill, whose token is the anchor."""
        host = self._begin(slots, [1] * len(slots), ())
        for name, values in (("starts", starts), ("anchors", anchors), ("picked", picked)):
            part = self._part(host, name)
            part[: len(values)] = values
            part[len(values) :] = 0  # padding picks a row too
        self._part(host, "proposal_counts")[:] = 0
        self._upload.send()

    def send_updates(self, updates: Sequence[TableUpdate]) -> None:
        """Pages alone."""
        self._begin((), (), updates)
        self._upload.send()

    def _begin(
        self, slots: Sequence[int], counts: Sequence[int], updates: Sequence[TableUpdate]
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        host = self._upload.host()
        offsets = np.cumsum([0, *counts])
        self._part(host, "counts")[:] = (len(slots), offsets[-1])
        self._part(host, "slots")[: len(slots)] = slots
        part = self._part(host, "offsets")
        part[: len(offsets)] = offsets
        part[len(offsets) :] = offsets[-1]
        self._part(host, "update_count")[0] = len(updates)
        if updates:
            flat = np.asarray(updates, np.int32).reshape(-1)
            self._part(host, "updates")[: len(flat)] = flat
        return host

    def _part(
        self, host: np.ndarray[tuple[int, ...], np.dtype[np.int32]], name: str
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        return host[self._spans[name]]


def _clipped(values: Sequence[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """A peer's numbers as int32: what does not fit is as invalid at the edge of the range."""
    wide = np.asarray(values, np.int64)
    return np.clip(wide, -(2**31), 2**31 - 1).astype(np.int32)
