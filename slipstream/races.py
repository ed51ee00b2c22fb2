"""The fast way to draw tokens on a host: compute noise only for tokens that can still win.

Every filter keeps a beginning of the tokens in order (value descending, then id), so it can be
asked after the race instead of before: the winner among any candidates that hold all kept tokens is
the draw if it is kept itself; if not, no token at or behind it in the order is kept, and the race
is run again among those before it. The candidates are

- min-p: exactly the tokens it keeps;
- top-k: the tokens down to a depth at which there are k of them;
- top-p alone: down to a depth that holds its mass, the whole mass being summed in fp32;
- no filter: the tokens that the bounds of the noise leave, once some token's score is known.

Only the sum in fp32 is inexact. A winner whose place is within its error of the nucleus' edge is
not decided here: `run` answers None, and the reference decides.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from slipstream.noise import (
    F32,
    GUMBEL_HIGH,
    I64,
    U64,
    gumbel_of,
    token_words,
    vocabulary_words,
)
from slipstream.params import History, RowSampling, SamplingParams, fp32

_DEPTHS = (5.0, 10.0, 20.0, math.inf)
"""Depths, in nats below the best token, at which candidates are looked for, one after the other."""

_NEAR = 4.0
"""Depth of the tokens whose scores bound the others' when nothing is filtered."""

_SUM_ERROR = 1e-4
"""Far more than the relative error of a sum of exponentials in fp32."""

_EXACT_ERROR = 1e-9
"""The same of a sum in fp64; the reference may add in another order."""

_MANY = 512
"""Candidates up to which their words are always computed one by one, together with other races'."""

_PRUNE = 2048
"""Candidates from which on a comparison of raw words pays before two logarithms of each."""


@dataclass(slots=True)
class _Race:
    """Candidates of one row: ids ascending, their logit / T, and the words of their noise.

    `total` is the mass of the kept tokens before top-p, relative to the best token's; NaN when
    top-p is off. `error` bounds its relative error. `least` is a score that some candidate has,
    known once an unfiltered race is widened.
    """

    index: int
    row: RowSampling
    edited: F32
    top: np.float32
    ids: I64
    scaled: F32
    total: float = math.nan
    error: float = _EXACT_ERROR
    least: float | None = None


def run(logits: F32, rows: Sequence[RowSampling]) -> list[int | None]:
    """The token of every row of `logits` (R, V); None where only the reference can tell."""
    drawn: list[int | None] = [None] * len(rows)
    tables = _Tables()
    entered: list[_Race] = []
    with np.errstate(all="ignore"):
        for index, row in enumerate(rows):
            edited = _edit(logits[index], row, tables)
            if row.params.greedy:
                best = int(edited.argmax())
                drawn[index] = best if edited[best] > -math.inf else None
                continue
            race = _enter(index, row, edited)
            if race is not None:
                entered.append(race)
        noise = _Noise(logits.shape[1])
        widened: list[_Race] = []
        for race, words in zip(entered, noise.words(entered), strict=True):
            if race.row.params.filtered:
                drawn[race.index] = _decide(race, words)
            else:
                _widen(race, words)
                widened.append(race)
        for race, words in zip(widened, noise.words(widened), strict=True):
            drawn[race.index] = int(race.ids[_winner(race.scaled, words, race.least)])
    return drawn


def _enter(index: int, row: RowSampling, edited: F32) -> _Race | None:
    """The candidates of a row; None when the row has no finite best value."""
    params = row.params
    temperature = np.float32(params.temperature)
    top = np.float32(edited.max() / temperature)
    if not math.isfinite(top):
        return None
    if not params.filtered:
        return _Race(index, row, edited, top, *_down_to(edited, temperature, top, _NEAR))
    if params.min_p > 0:
        ids, scaled = _down_to(edited, temperature, top, params.min_p_depth)
    elif params.top_k > 0:
        for depth in _DEPTHS:
            ids, scaled = _down_to(edited, temperature, top, depth)
            if len(ids) >= params.top_k:
                break
    else:
        return _enter_nucleus(index, row, edited, top)
    race = _Race(index, row, edited, top, ids, scaled)
    if params.top_p < 1:
        race.total = _mass(_best(scaled, params.top_k), top)
    return race


def _enter_nucleus(index: int, row: RowSampling, edited: F32, top: np.float32) -> _Race:
    temperature = np.float32(row.params.temperature)
    exponents = np.divide(edited, temperature)
    exponents -= top
    total = float(torch.from_numpy(exponents).exp_().sum())  # numpy's fp32 exp is the slower one
    enough = fp32(row.params.top_p) * total * (1 + _SUM_ERROR)
    for depth in _DEPTHS:
        ids, scaled = _down_to(edited, temperature, top, depth)
        if _mass(scaled, top) >= enough:
            break
    return _Race(index, row, edited, top, ids, scaled, total, _SUM_ERROR)


def _down_to(
    edited: F32, temperature: np.float32, top: np.float32, depth: float
) -> tuple[I64, F32]:
    """Ids, ascending, whose logit / T is at least `top - depth`, and those values."""
    edge = top - np.float32(depth)
    if edge == -math.inf:
        ids = np.flatnonzero(edited > -math.inf)
        return ids, edited[ids] / temperature
    rim = edge * temperature
    ids = np.flatnonzero(edited >= rim - abs(rim) * np.float32(1e-6))
    scaled = edited[ids] / temperature
    inside = scaled >= edge
    return (ids, scaled) if inside.all() else (ids[inside], scaled[inside])


def _best(scaled: F32, count: int) -> F32:
    """The `count` largest values; all of them when `count` is 0."""
    surplus = len(scaled) - count
    return scaled if count == 0 or surplus <= 0 else np.partition(scaled, surplus)[surplus:]


def _mass(scaled: F32, top: np.float32) -> float:
    return float(np.exp(scaled.astype(np.float64) - np.float64(top)).sum())


class _Noise:
    """Words for many races at once; a vocabulary's once per seed, choice and position."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._whole: dict[tuple[int, int, int], U64] = {}

    def words(self, races: Sequence[_Race]) -> list[U64]:
        """The words of each race's candidates."""
        few = [race for race in races if not self._many(race.ids)]
        sizes = [len(race.ids) for race in few]
        flat = np.empty(0, np.uint64)
        if few:
            keys = np.array([_key(race.row) for race in few], np.uint64)  # (races, 3)
            seeds, choices, positions = np.repeat(keys, sizes, axis=0).T
            ids = np.concatenate([race.ids for race in few])
            flat = token_words(ids, positions, choices, seeds)
        parts = iter(np.split(flat, np.cumsum(sizes)[:-1]))
        return [self._of_whole(race) if self._many(race.ids) else next(parts) for race in races]

    def _of_whole(self, race: _Race) -> U64:
        seed, choice, position = key = _key(race.row)
        if key not in self._whole:
            self._whole[key] = vocabulary_words(self._vocab_size, position, choice, seed)
        return self._whole[key][race.ids]

    def _many(self, ids: I64) -> bool:
        return len(ids) > max(_MANY, self._vocab_size // 8)


def _key(row: RowSampling) -> tuple[int, int, int]:
    return row.params.seed, row.params.choice, row.position


def _decide(race: _Race, words: U64) -> int | None:
    """Runs the race until its winner is kept by top-k and top-p."""
    params = race.row.params
    ids, scaled = race.ids, race.scaled
    edge = fp32(params.top_p) * race.total
    while True:
        winner = _winner(scaled, words)
        before = scaled > scaled[winner]
        before[:winner] |= scaled[:winner] == scaled[winner]
        rank = int(np.count_nonzero(before))
        if rank == 0:
            return int(ids[winner])
        kept = params.top_k == 0 or rank < params.top_k
        if kept and params.top_p < 1:
            mass = _mass(scaled[before], race.top)
            if abs(mass - edge) <= edge * race.error:
                return None
            kept = mass < edge
        if kept:
            return int(ids[winner])
        ids, scaled, words = ids[before], scaled[before], words[before]


def _widen(race: _Race, words: U64) -> None:
    """Makes all tokens that can still win the candidates, given the words of the near ones."""
    race.least = float((race.scaled + gumbel_of(words)).max())
    depth = float(race.top) - (race.least - GUMBEL_HIGH) + _score_error(race.top)
    temperature = np.float32(race.row.params.temperature)
    race.ids, race.scaled = _down_to(race.edited, temperature, race.top, depth)


def _winner(scaled: F32, words: U64, least: float | None = None) -> int:
    """Index of the largest score, the first of equals; `least` is a score that one of them has.

    A token of value y can reach the score s only if its Gumbel value reaches s - y, hence only if
    w <= exp(y - s): raw words are compared before any logarithm is taken.
    """
    if len(scaled) <= _PRUNE:
        return int((scaled + gumbel_of(words)).argmax())
    top = np.float32(scaled.max())
    if least is None:
        near = np.flatnonzero(scaled >= top - np.float32(_NEAR))
        least = float((scaled[near] + gumbel_of(words[near])).max())
    limit = scaled - np.float32(least - _score_error(top))
    limit = torch.from_numpy(limit).exp_().numpy() * np.float32(2.0**32) + np.float32(1)
    able = np.flatnonzero(words.astype(np.float32) <= limit)
    return int(able[(scaled[able] + gumbel_of(words[able])).argmax()])


def _score_error(top: np.float32) -> float:
    """More than what rounding a noise and its sum with a value near `top` can add to a score."""
    return 1e-3 + 4 * float(np.spacing(abs(top)))


_NOTHING = History()


class _Tables:
    """A history's tokens as arrays, made once per call and history."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[I64, I64, F32]] = {}

    def of(self, history: History) -> tuple[I64, I64, F32]:
        """Ids that are in the prompt only; ids in the output, and how often they are."""
        made = self._made.get(id(history))
        if made is None:
            output = history.output
            made = (
                _ids(history.prompt - output.keys()),
                _ids(output),
                np.fromiter(output.values(), np.float32, len(output)),
            )
            self._made[id(history)] = made
        return made


def _ids(tokens: Iterable[int]) -> I64:
    return np.array(list(tokens), np.int64)


def _edit(logits: F32, row: RowSampling, tables: _Tables) -> F32:
    """`logits` (V,) with bias, penalties, bans and grammar; the same array without any."""
    params = row.params
    banned = [*(row.banned if row.position < row.banned_until else ()), *params.banned_ids]
    penalised = params.penalised and (row.history is not None or len(row.path) > 0)
    if not (params.logit_bias or penalised or banned or row.allowed is not None):
        return logits
    edited = logits.copy()
    if params.logit_bias:
        values = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
        edited[_ids(params.logit_bias)] += values
    if penalised:
        _penalise(edited, row, tables)
    if banned:
        edited[_ids(banned)] = -math.inf
    if row.allowed is not None:
        edited[~allowed_ids(row.allowed, len(edited))] = -math.inf
    return edited


def allowed_ids(bitmap: bytes, vocab_size: int) -> npt.NDArray[np.bool_]:
    """Whether each id is in a bitmap; ids that it has no bit for are not."""
    bits = np.frombuffer(bitmap, np.uint8)
    found = np.zeros(vocab_size, np.bool_)
    known = np.unpackbits(bits, count=min(vocab_size, 8 * len(bits)), bitorder="little")
    found[: len(known)] = known
    return found


def _penalise(edited: F32, row: RowSampling, tables: _Tables) -> None:
    params, history = row.params, row.history or _NOTHING
    prompt_only, output, counts = tables.of(history)
    path = Counter(row.path)
    path_ids = _ids(path)
    path_values = edited[path_ids]
    edited[prompt_only] = _repeated(edited[prompt_only], params)
    edited[output] = _counted(_repeated(edited[output], params), counts, params)
    # A path token counts together with what is committed, as plain decoding would have it.
    together = np.array([history.output[token] + n for token, n in path.items()], np.float32)
    edited[path_ids] = _counted(_repeated(path_values, params), together, params)


def _repeated(values: F32, params: SamplingParams) -> F32:
    if params.repetition_penalty == 1.0:
        return values
    factor = np.float32(params.repetition_penalty)
    return np.where(values > 0, values / factor, values * factor)


def _counted(values: F32, counts: F32, params: SamplingParams) -> F32:
    lowered = values - np.float32(params.frequency_penalty) * counts
    lowered -= np.float32(params.presence_penalty)
    return lowered
