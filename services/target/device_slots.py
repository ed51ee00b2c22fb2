"""The sampling state of all slots on a device; the host writes it at admission, kernels later."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.target.runner import SlotAdmit
from slipstream.kernels import slot_state as columns
from slipstream.kernels.noise import int32_word
from slipstream.kernels.slot_state import WORDS, SlotState
from slipstream.params import fp32

SamplerClass: TypeAlias = Literal["greedy", "full"]
"""Greedy: the largest raw logit decides and nothing more is wanted of the row."""

I32: TypeAlias = npt.NDArray[np.int32]

_TABLES = 8
"""Admissions with tables of the vocabulary's size whose copies may be in flight."""

_HEAD = ("start", "anchor", "limit", "finished")


class DeviceSlots:
    """Device state of all slots.

    Attributes:
        state: what kernels read and write.
        cursor: (slots,) int32, feature rows that the session's draft was given.
        max_logprobs: most best tokens that a request may want.
    """

    def __init__(
        self,
        slots: int,
        vocab_size: int,
        max_logprobs: int = 20,
        device: torch.device | str = "cpu",
    ) -> None:
        self.state = SlotState.allocate(slots, vocab_size, device)
        self.cursor = torch.zeros(slots, dtype=torch.int32, device=device)
        self.max_logprobs = max_logprobs
        self._vocab_size = vocab_size
        place = torch.device(device)
        # Every slot may be admitted while the stream waits for a draft, which must hold nothing up.
        self._words = _Ring([_Words(vocab_size, place) for _ in range(slots + 1)])
        self._tables = _Ring([_Tables(vocab_size, place) for _ in range(_TABLES)])
        self._nothing = _Transfer(place).pinned(slots)
        self._drawn: dict[int, _Drawn] = {}

    @property
    def start(self) -> Tensor:
        """(slots,) int32, KV rows of each slot."""
        return self.state.start

    def admit(self, slot: int, admit: SlotAdmit) -> None:
        """Writes the slot's state, in order with the current stream.

        `start` and the cursor become 0, the anchor the last known token. Only copies are made, no
        kernel is launched, and tables that the request does not use are left alone. Nothing is
        waited for but, where the few tables that few requests need are used, the copies of the
        eighth admission before that used some. Raises ValueError when more than `max_logprobs` best
        tokens are wanted.
        """
        if admit.logprobs is not None and admit.logprobs > self.max_logprobs:
            raise ValueError(f"logprobs {admit.logprobs} is above {self.max_logprobs}")
        known = [*admit.prompt_ids[-1:], *admit.output_ids[-1:]]
        words = self._words.take()
        words.head[:] = (0, known[-1] if known else 0, admit.limit, 0, 0)
        words.words[:] = _words(admit)
        for index, name in enumerate(_HEAD):
            place: Tensor = getattr(self.state, name)
            words.send(words.pinned_head[index : index + 1], place[slot : slot + 1])
        words.send(words.pinned_head[len(_HEAD) :], self.cursor[slot : slot + 1])
        words.send(words.pinned_words, self.state.words[slot])
        if admit.stop_ids:
            _set_bits(words.stop_bits, admit.stop_ids, self._vocab_size)
            words.send(words.pinned_bits, self.state.stop_bits[slot])
        words.sent()
        if admit.sampling.penalised or admit.sampling.biased:
            self._send_tables(slot, admit)
        self._drawn[slot] = _Drawn.of(admit)

    def _send_tables(self, slot: int, admit: SlotAdmit) -> None:
        params, tables = admit.sampling, self._tables.take()
        if params.penalised:
            _set_bits(tables.prompt_bits, admit.prompt_ids, self._vocab_size)
            tables.send("prompt_bits", self.state.prompt_bits[slot])
            output = np.asarray(admit.output_ids, np.int64)
            tables.counts[:] = np.bincount(output, minlength=self._vocab_size)
            tables.send("counts", self.state.counts[slot])
        if params.biased:
            tables.bias[:] = 0
            tables.bias[list(params.logit_bias)] = list(params.logit_bias.values())
            tables.bias[list(params.banned_ids)] = -np.inf
            tables.send("bias", self.state.bias[slot])
        tables.sent()

    def rewind(self, slot: int, rows: int) -> None:
        """Sets the slot's cursor, in order with the current stream.

        By a copy, as all is done here: a kernel that is launched on its own can slow down all
        others from then on (`slipstream.layers.kernel_gaps`).
        """
        words = self._words.take()
        words.head[len(_HEAD)] = rows
        words.send(words.pinned_head[len(_HEAD) :], self.cursor[slot : slot + 1])
        words.sent()

    def rewind_all(self) -> None:
        """A new session begins: its draft was given nothing."""
        self.cursor.copy_(self._nothing, non_blocking=True)

    def release(self, slot: int) -> None:
        """Forgets the slot's request; what the device holds of it is overwritten by the next."""
        del self._drawn[slot]

    def sampler_class(self, slot: int, position: int = 0) -> SamplerClass:
        """What draws of the slot need from `position` on, the position that a draw decides."""
        drawn = self._drawn[slot]
        return "greedy" if drawn.raw and position >= drawn.banned_until else "full"


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Whether the raw logits decide, from position `banned_until` on."""

    raw: bool
    banned_until: int

    @classmethod
    def of(cls, admit: SlotAdmit) -> _Drawn:
        params = admit.sampling
        edited = params.penalised or params.biased or admit.grammar is not None
        banned = admit.stop_ids and admit.min_tokens > len(admit.output_ids)
        return cls(
            params.greedy and not edited and admit.logprobs is None,
            _min_until(admit) if banned else 0,
        )


class _Transfer:
    """Pinned buffers, and the end of the last transfer from them."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._event = torch.cuda.Event() if self._cuda else None  # type: ignore[no-untyped-call]

    def pinned(self, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(count, dtype=dtype, pin_memory=self._cuda)

    def sent(self) -> None:
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        if self._event is not None and not self._event.query():  # type: ignore[no-untyped-call]
            self._event.synchronize()


class _Words(_Transfer):
    """What every slot has: its numbers and its stop ids."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(device)
        self.pinned_head, self.pinned_words = self.pinned(len(_HEAD) + 1), self.pinned(WORDS)
        self.pinned_bits = self.pinned(-(-vocab_size // 32))
        self.head: I32 = self.pinned_head.numpy()
        self.words: I32 = self.pinned_words.numpy()
        self.stop_bits: I32 = self.pinned_bits.numpy()

    def send(self, source: Tensor, place: Tensor) -> None:
        place.copy_(source, non_blocking=True)


class _Tables(_Transfer):
    """Tables over the vocabulary that few slots have."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(device)
        self._pinned = {
            "prompt_bits": self.pinned(-(-vocab_size // 32)),
            "counts": self.pinned(vocab_size),
            "bias": self.pinned(vocab_size, torch.float32),
        }
        self.prompt_bits: I32 = self._pinned["prompt_bits"].numpy()
        self.counts: I32 = self._pinned["counts"].numpy()
        self.bias: npt.NDArray[np.float32] = self._pinned["bias"].numpy()

    def send(self, name: str, place: Tensor) -> None:
        place.copy_(self._pinned[name], non_blocking=True)


T = TypeVar("T", bound=_Transfer)


class _Ring(Generic[T]):
    """Buffers that are handed out in turn, each once its last transfer has ended."""

    def __init__(self, buffers: Sequence[T]) -> None:
        self._buffers = buffers
        self._next = 0

    def take(self) -> T:
        taken = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        taken.wait()
        return taken


def _min_until(admit: SlotAdmit) -> int:
    return len(admit.prompt_ids) + admit.min_tokens


def _words(admit: SlotAdmit) -> I32:
    """The row of the parameter table; a number beyond fp32 is infinite, as in the reference."""
    params = admit.sampling
    words = np.zeros(WORDS, np.int32)
    values = words.view(np.float32)
    words[columns.FLAGS.value] = _flags(admit)
    values[columns.TOP_P.value] = fp32(params.top_p)
    words[columns.TOP_K.value] = min(params.top_k, 2**31 - 1)
    values[columns.MIN_P_DEPTH.value] = params.min_p_depth
    values[columns.PRESENCE.value] = params.presence_penalty
    values[columns.FREQUENCY.value] = params.frequency_penalty
    with np.errstate(over="ignore"):
        values[columns.TEMPERATURE.value] = params.temperature
        values[columns.REPETITION.value] = params.repetition_penalty
    words[columns.SEED_LOW.value] = int32_word(params.seed)
    words[columns.SEED_HIGH.value] = int32_word(params.seed >> 32)
    words[columns.CHOICE.value] = int32_word(params.choice)
    words[columns.MIN_UNTIL.value] = min(_min_until(admit), 2**31 - 1)
    words[columns.LOGPROBS.value] = -1 if admit.logprobs is None else admit.logprobs
    return words


def _flags(admit: SlotAdmit) -> int:
    params = admit.sampling
    flags = {
        columns.GREEDY.value: params.greedy,
        columns.BIASED.value: params.biased,
        columns.PENALISED.value: params.penalised,
        columns.HAS_TOP_P.value: params.top_p < 1,
        columns.HAS_MIN_P.value: params.min_p > 0,
        columns.HAS_STOPS.value: bool(admit.stop_ids),
        columns.GRAMMAR.value: admit.grammar is not None,
    }
    return sum(flag for flag, on in flags.items() if on)


def _set_bits(words: I32, tokens: Iterable[int], vocab_size: int) -> None:
    """Bit v % 32 of word v // 32 for every token v of the vocabulary, no other."""
    bits = np.zeros(32 * len(words), np.uint8)
    ids = np.fromiter(tokens, np.int64)
    bits[ids[(ids >= 0) & (ids < vocab_size)]] = 1
    words[:] = np.packbits(bits, bitorder="little").view("<i4")
