"""Attention over paged keys and values for ragged rows: the torch backend.

On a CPU the products run in fp32, whatever the pages' type: fp32 products of these sizes take any
shape without a compilation, while bf16 ones are compiled for every new length.

A batch is planned once per (window, direction) and the plan is reused by all layers: entries of
similar length are gathered into one padded product; an entry alone is read in place when its pages
lie side by side. A chain's mask is a constant triangle over its own rows: nothing is built for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.layers.rows import RowBatch, flat_start, slots_of, unpack_bits

BLOCK = (
    128  # query rows of one product: bounds the scores' memory, and skips keys a causal row hides
)
GROUP_ROWS = 64  # an entry with more rows fills the cores alone
PADDING = 1.3  # most padded work over real work in a gathered group


def write_kv(k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor, batch: RowBatch) -> None:
    """Writes the rows' keys and values (T, kv, hd) to the slots start + i of their entries.

    Pages are (pages, page_size, kv, hd), written in place; rows are converted to the pages' type.
    """
    size = k_pages.shape[1]
    where = batch.cache.get(("write", size))
    if where is None:
        where = _write_slots(batch, size, k_pages.device)
        batch.cache[("write", size)] = where
    for pages, rows in ((k_pages, k), (v_pages, v)):
        flat = pages.view(-1, *pages.shape[2:])
        if isinstance(where, slice):
            flat[where] = rows
        else:
            flat.index_copy_(0, where, rows.to(flat.dtype))


def _write_slots(batch: RowBatch, page_size: int, device: torch.device) -> slice | Tensor:
    spans = [(s, s + batch.count(e)) for e, s in enumerate(batch.start_list)]
    if len(spans) == 1:
        flat = flat_start(batch.pages[0], *spans[0], page_size)
        if flat is not None:
            return slice(flat, flat + batch.count(0))
    slots = [slots_of(p, *span, page_size) for p, span in zip(batch.pages, spans, strict=True)]
    return torch.cat(slots).to(device)


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: RowBatch,
    *,
    scale: float,
    window: int | None = None,
    bidirectional: bool | None = None,
    backend: str = "torch",
) -> Tensor:
    """Attention of rows q (T, heads, hd) over their entry's prefix and visible own rows.

    Keys of the own rows must have been written (`write_kv`). Query head h reads key head
    h // (heads / kv). With a window W a key is visible when |q_pos - k_pos| < W. `bidirectional`
    overrides the batch's.

    Returns (T, heads, hd) in fp32 on a CPU, in q's type elsewhere.
    Raises ConfigError on an unknown backend.
    """
    if backend != "torch":
        raise ConfigError(f"unknown attention backend {backend!r}; known: torch")
    both = batch.bidirectional if bidirectional is None else bidirectional
    key = ("plan", k_pages.shape, k_pages.dtype, window, both)
    plan = batch.cache.get(key)
    if plan is None:
        plan = _Planner(batch, k_pages, window, both).plan()
        batch.cache[key] = plan
    compute = torch.float32 if q.device.type == "cpu" else q.dtype
    query = q.to(compute)
    flat_k = k_pages.view(-1, *k_pages.shape[2:])
    flat_v = v_pages.view(-1, *v_pages.shape[2:])
    if len(plan) == 1:
        return plan[0].run(query, flat_k, flat_v, scale)
    out = torch.empty_like(query)
    for part in plan:
        out[part.rows] = part.run(query, flat_k, flat_v, scale)
    return out


class _Scratch:
    """Buffers of one plan, used again by its parts and by every layer.

    Fresh megabytes cost their page faults each time.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An uninitialised tensor of `shape` in the type and on the device of `like`."""
        size, key = math.prod(shape), (name, like.dtype)
        found = self._buffers.get(key)
        if found is None or len(found) < size:
            found = torch.empty(size, dtype=like.dtype, device=like.device)
            self._buffers[key] = found
        return found[:size].view(shape)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of one entry that see the same keys, up to `bias` over the last of them.

    keys: a slice of the flat cache, or slot indices. bias: (n, columns) fp32, 0 or -inf, for the
    last `columns` keys; None when every row sees every key.
    """

    rows: slice
    keys: slice | Tensor
    bias: Tensor | None
    scratch: _Scratch

    def run(self, q: Tensor, flat_k: Tensor, flat_v: Tensor, scale: float) -> Tensor:
        query = q[self.rows]
        n, heads, dim = query.shape
        kv = flat_k.shape[1]
        k = self._read("k", flat_k, q)  # (keys, kv, hd)
        v = self._read("v", flat_v, q)
        groups = heads // kv
        folded = query.view(n, kv, groups, dim).permute(1, 2, 0, 3).reshape(kv, groups * n, dim)
        out = _attend(
            folded, k.permute(1, 2, 0), v.transpose(0, 1), scale, self.bias, n, self.scratch
        )
        return out.view(kv, groups, n, dim).permute(2, 0, 1, 3).reshape(n, heads, dim)

    def _read(self, name: str, flat: Tensor, q: Tensor) -> Tensor:
        if isinstance(self.keys, slice):
            rows = flat[self.keys]
        else:
            shape = (len(self.keys), *flat.shape[1:])
            rows = self.scratch.get(f"{name} gathered", shape, flat)
            torch.index_select(flat, 0, self.keys, out=rows)
        if rows.dtype == q.dtype:
            return rows
        return self.scratch.get(name, tuple(rows.shape), q).copy_(rows)


@dataclass(frozen=True, slots=True)
class _Group:
    """B entries padded to n rows and S keys, gathered into one product.

    gather: (B * S,) slot indices. take: (B * n,) rows of the batch, None when the rows are just
    `rows`; give: indices into B * n that undo it, with `rows`.
    bias: (B, 1, n, columns) over the last `columns` keys, or None.
    """

    rows: slice | Tensor
    entries: int
    n: int
    gather: Tensor
    take: Tensor | None
    give: Tensor | None
    bias: Tensor | None
    scratch: _Scratch

    def run(self, q: Tensor, flat_k: Tensor, flat_v: Tensor, scale: float) -> Tensor:
        query = q[self.rows] if self.take is None else q.index_select(0, self.take)
        (heads, dim), kv, b, n = query.shape[1:], flat_k.shape[1], self.entries, self.n
        groups = heads // kv
        k, v = self._read("k", flat_k, q), self._read("v", flat_v, q)  # (B * kv, S, hd)
        folded = query.view(b, n, kv, groups, dim).permute(0, 2, 3, 1, 4)
        folded = folded.reshape(b * kv, groups * n, dim)
        out = _attend(folded, k.transpose(1, 2), v, scale, self.bias, n, self.scratch)
        out = out.view(b, kv, groups, n, dim).permute(0, 3, 1, 2, 4).reshape(b * n, heads, dim)
        return out if self.give is None else out.index_select(0, self.give)

    def _read(self, name: str, flat: Tensor, q: Tensor) -> Tensor:
        kv, dim = flat.shape[1:]
        rows = self.scratch.get(f"{name} gathered", (len(self.gather), kv, dim), flat)
        torch.index_select(flat, 0, self.gather, out=rows)
        keys = len(self.gather) // self.entries
        out = self.scratch.get(name, (self.entries, kv, keys, dim), q)
        out.copy_(rows.view(self.entries, keys, kv, dim).transpose(1, 2))
        return out.view(-1, keys, dim)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Tensor | None,
    rows: int,
    scratch: _Scratch,
) -> Tensor:
    """softmax(scale q k + bias) v for q (b, g * rows, hd), k (b, hd, S), v (b, S, hd)."""
    shape = (q.shape[0], q.shape[1], k.shape[2])
    scores, weights = scratch.get("scores", shape, q), scratch.get("weights", shape, q)
    torch.baddbmm(_zero(q.device, q.dtype), q, k, beta=0, alpha=scale, out=scores)
    if bias is not None:
        entries = bias.shape[0] if bias.dim() == 4 else 1
        last = scores.view(entries, -1, rows, shape[2])[..., -bias.shape[-1] :]
        last += bias
    torch.softmax(scores, -1, out=weights)
    return torch.bmm(weights, v)


@lru_cache(maxsize=8)
def _zero(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.zeros(1, 1, 1, device=device, dtype=dtype)


@lru_cache(maxsize=BLOCK)
def _triangle(n: int, device: torch.device) -> Tensor:
    """(n, n) fp32: 0 on and below the diagonal, -inf above."""
    return torch.full((n, n), -torch.inf, device=device).triu(1)


def mask_from_ancestors(batch: RowBatch, entry: int) -> Tensor:
    """(n, n) bool: row i of the entry sees its row j. For trees only."""
    assert batch.ancestors is not None
    rows = slice(batch.offsets[entry], batch.offsets[entry + 1])
    return unpack_bits(batch.ancestors[rows], batch.count(entry))


def _additive(visible: Tensor) -> Tensor:
    bias = torch.zeros(visible.shape, device=visible.device)
    return bias.masked_fill_(~visible, -torch.inf)


class _Planner:
    """Works out, once per batch, which products make up an attention call."""

    def __init__(
        self, batch: RowBatch, k_pages: Tensor, window: int | None, bidirectional: bool
    ) -> None:
        self.batch = batch
        self.page_size = k_pages.shape[1]
        self.device = k_pages.device
        self.window = window
        self.both = bidirectional
        self.own: dict[int, Tensor | None] = {}
        self.scratch = _Scratch()

    def plan(self) -> list[_Piece | _Group]:
        parts: list[_Piece | _Group] = []
        for entries in self._grouped():
            if len(entries) > 1:
                parts.append(self._group(entries))
            else:
                parts.extend(self._pieces(entries[0]))
        return parts

    def _reach(self, entry: int) -> int:
        """Keys of the entry: prefix and own rows."""
        return self.batch.start_list[entry] + self.batch.count(entry)

    def _windowed(self, entry: int) -> bool:
        return self.window is not None and self._reach(entry) > self.window

    def _grouped(self) -> list[list[int]]:
        """Entries in runs of similar key and row counts; entries for `_pieces` stand alone."""
        batch = self.batch
        alone = [e for e in range(len(batch)) if self._lonely(e)]
        rest = sorted(set(range(len(batch))) - set(alone), key=self._reach, reverse=True)
        runs: list[list[int]] = []
        real = rows = 0
        for entry in rest:
            n, keys = batch.count(entry), self._reach(entry)
            if runs:
                most = max(rows, n)
                padded = (len(runs[-1]) + 1) * most * self._reach(runs[-1][0])
                if padded <= PADDING * (real + n * keys):
                    runs[-1].append(entry)
                    real, rows = real + n * keys, most
                    continue
            runs.append([entry])
            real, rows = n * keys, n
        return [[e] for e in alone] + [sorted(run) for run in runs]

    def _lonely(self, entry: int) -> bool:
        return self.batch.count(entry) > GROUP_ROWS or self._windowed(entry)

    def _own_bias(self, entry: int) -> Tensor | None:
        """(n, n) bias among the entry's own rows; None when all of them are visible."""
        n = self.batch.count(entry)
        if n == 1 or self.both:
            return None
        if self.batch.ancestors is None:
            return _triangle(n, self.device)
        if entry not in self.own:
            self.own[entry] = _additive(mask_from_ancestors(self.batch, entry))
        return self.own[entry]

    def _pieces(self, entry: int) -> list[_Piece]:
        first, n = self.batch.offsets[entry], self.batch.count(entry)
        start = self.batch.start_list[entry]
        chain = self.batch.ancestors is None and not self.both
        own = None if chain else self._own_bias(entry)
        pieces = []
        for low in range(0, n, BLOCK):
            high = min(low + BLOCK, n)
            begin, reach = 0, start + (high if chain else n)
            bias: Tensor | None
            if self._windowed(entry):
                begin, bias = self._window_bias(entry, low, high, reach, own)
            elif chain:
                bias = _triangle(high - low, self.device) if high - low > 1 else None
            else:
                bias = None if own is None else own[low:high]
            rows = slice(first + low, first + high)
            pieces.append(_Piece(rows, self._keys(entry, begin, reach), bias, self.scratch))
        return pieces

    def _window_bias(
        self, entry: int, low: int, high: int, reach: int, own: Tensor | None
    ) -> tuple[int, Tensor]:
        """First key that rows low .. high - 1 may see, and their bias over the keys from it on."""
        assert self.window is not None
        offset, start = self.batch.offsets[entry], self.batch.start_list[entry]
        positions = self.batch.positions[offset : offset + self.batch.count(entry)]
        oldest = start if self.batch.ancestors is not None else start + low
        begin = max(0, oldest - self.window + 1)
        prefix = torch.arange(start, device=self.device)
        keys = torch.cat([prefix, positions[: reach - start]])
        visible = (positions[low:high, None] - keys).abs() < self.window
        if own is not None:
            visible[:, start:] &= own[low:high] == 0
        elif not self.both:
            row = torch.arange(low, high, device=self.device)[:, None]
            visible[:, start:] &= torch.arange(reach - start, device=self.device) <= row
        return begin, _additive(visible[:, begin:])

    def _keys(self, entry: int, begin: int, reach: int) -> slice | Tensor:
        pages = self.batch.pages[entry]
        flat = flat_start(pages, begin, reach, self.page_size)
        if flat is not None:
            return slice(flat, flat + reach - begin)
        return slots_of(pages, begin, reach, self.page_size).to(self.device)

    def _group(self, entries: list[int]) -> _Group:
        batch, count = self.batch, len(entries)
        counts = [batch.count(e) for e in entries]
        n, keys = max(counts), max(map(self._reach, entries))
        gather = torch.cat([self._padded_slots(e, keys) for e in entries]).to(self.device)
        side_by_side = entries == list(range(entries[0], entries[0] + count))
        rows: slice | Tensor
        take = give = None
        if min(counts) == n and side_by_side:
            rows = slice(batch.offsets[entries[0]], batch.offsets[entries[-1] + 1])
        else:
            spans = [range(batch.offsets[e], batch.offsets[e + 1]) for e in entries]
            rows = self._index([row for span in spans for row in span])
            take = self._index([row for s in spans for row in [*s, *([s[0]] * (n - len(s)))]])
            give = self._index([b * n + i for b, c in enumerate(counts) for i in range(c)])
        bias = self._group_bias(entries, n, keys)
        return _Group(rows, count, n, gather, take, give, bias, self.scratch)

    def _index(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self.device)

    def _padded_slots(self, entry: int, keys: int) -> Tensor:
        """(keys,) slots of the entry's keys, the first one repeated up to `keys`."""
        pages = self.batch.pages[entry]
        real = slots_of(pages, 0, self._reach(entry), self.page_size)
        return torch.cat([real, real[:1].expand(keys - len(real))])

    def _group_bias(self, entries: list[int], n: int, keys: int) -> Tensor | None:
        """(B, 1, n, columns) from the first column that any row may not see; None without one."""
        starts = [self.batch.start_list[e] for e in entries]
        hidden = min(map(self._reach, entries)) < keys
        own = [self._own_bias(e) for e in entries]
        if not hidden and all(bias is None for bias in own):
            return None
        column = min(starts)
        out = torch.full((len(entries), 1, n, keys - column), -torch.inf, device=self.device)
        for b, (entry, start, bias) in enumerate(zip(entries, starts, own, strict=True)):
            count = self.batch.count(entry)
            first = start - column
            out[b, 0, :, :first] = 0.0
            out[b, 0, :count, first : first + count] = 0.0 if bias is None else bias
            out[b, 0, count:, first] = 0.0  # padding rows are dropped; this keeps them finite
        return out
