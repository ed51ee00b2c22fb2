"""What the next step is: a prefill chunk, or a decode step of one group, and of how many rows.

A plan never depends on results that are not there yet: it names slots and bounds only, so the next
one can be sent while the last one runs.
"""

from __future__ import annotations

from typing import Protocol

from gateway.board import DECODE, PREFILL, Board, Running, Step
from gateway.nodes import NodeChooser
from gateway.pairing import Shape
from gateway.pingpong import PingPong


class Hooks(Protocol):
    """What planning may have to do to a slot."""

    def preempt(self, running: Running) -> None:
        """Releases the slot and queues its request again."""
        ...

    def rewind(self, running: Running) -> None:
        """Sets the slot's publish cursor back to what the draft has."""
        ...


class Planner:
    """Plans the steps of one board.

    Args:
        depth: plans ahead of the step that runs; 0 is the lock-step loop.
        chunk: rows of a prefill plan at most.
        replay_rows: context rows that a step may publish for slots that are behind.

    Attributes:
        chooser, pingpong: set when a draft is known.
        block_size: tokens that one step may commit at most.
        groups: ping-pong groups at the moment.
    """

    def __init__(self, board: Board, hooks: Hooks, depth: int, chunk: int) -> None:
        self.chooser: NodeChooser | None = None
        self.pingpong: PingPong | None = None
        self.block_size = 1
        self.replay_rows = 0
        self.groups = 1
        self._board = board
        self._hooks = hooks
        # The one difference between the lock-step loop and running ahead: how many steps a slot,
        # and a group, may have in flight.
        self._window = 1 + depth
        self._chunk = chunk
        self._in_flight = [0, 0]
        self._last_group = 1
        self._since_prefill = 1 << 30

    @property
    def most_in_flight(self) -> int:
        """Steps that may be in flight; a ring of one more entry never overruns."""
        return self._window * (self.pingpong.most_groups if self.pingpong else 1)

    @property
    def has_room(self) -> bool:
        """Whether a further step may be sent, if there is one."""
        board = self._board
        return len(board.flight) < self._window * self.groups and bool(
            board.prefilling or board.decoding
        )

    def most_nodes(self, drafts: bool) -> int:
        """Rows of the largest plan of a slot; `drafts`: whether its request may draft."""
        return self.chooser.candidates[-1] if self.chooser is not None and drafts else 1

    def adopt(self, shape: Shape) -> None:
        """A draft is known."""
        self.chooser, self.pingpong = shape.chooser, shape.pingpong
        self.block_size, self.replay_rows = shape.block_size, shape.replay_rows

    def measured(self, step: Step, ms: float, tokens: int) -> None:
        """A decode step that followed another without a pause took `ms` and gave `tokens`."""
        if self.chooser is None or self.pingpong is None:
            return
        plain = len(step.entries) - step.drafted
        self.chooser.observe_step(step.nodes, step.drafted, plain, step.groups == 2, ms)
        self.pingpong.observe(step.groups, len(step.entries) * step.groups, ms, tokens)

    def next(self, session: int) -> Step | None:
        """The next step, its pages reserved; None if there is nothing to do yet."""
        if not self.has_room:
            return None
        step = None
        if self._since_prefill >= self.groups:
            step = self._prefill(session)
        return step or self._decode(session) or self._prefill(session)

    def launched(self, step: Step) -> None:
        """The step was sent."""
        if step.kind == DECODE:
            self._in_flight[step.group] += 1
            self._last_group = step.group
            self._since_prefill += 1
        else:
            self._since_prefill = 0

    def finished(self, step: Step) -> None:
        """The step's result is there."""
        if step.kind == DECODE:
            self._in_flight[step.group] -= 1

    # Prefill

    def _prefill(self, session: int) -> Step | None:
        board, left = self._board, self._chunk
        step = Step(board.next_step, PREFILL, session)
        for running in tuple(board.prefilling):
            if left == 0:
                break
            if running.in_flight >= self._window:
                continue
            count = min(left, running.rows - running.sent)
            left -= count
            step.entries.append(running)
            step.spans.append((running.sent, count))
            running.sent += count
            running.cursor += 0 if running.live else count
            step.nodes_of.append(int(running.prefilled))
            if running.prefilled:
                board.prefilled(running)
                running.group = running.wanted = self._smaller_group()
        step.after = board.next_step - 1
        return step if step.entries else None

    # Decode

    def _decode(self, session: int) -> Step | None:
        self._regroup(session)
        for group in self._order():
            slots = self._plannable(group)
            if slots:
                step = self._decode_group(group, slots, session)
                if step.entries:
                    return step
        return None

    def _order(self) -> list[int]:
        """Groups that may have another step, the one that waited longest first."""
        order = [0]
        if self.groups == 2:
            order = [1 - self._last_group, self._last_group]
            order.sort(key=self._in_flight.__getitem__)
        return [group for group in order if self._in_flight[group] < self._window]

    def _plannable(self, group: int) -> list[Running]:
        slots = []
        for running in self._board.decoding:
            if running.group != running.wanted:
                if running.in_flight:
                    continue
                running.group = running.wanted
            if running.group == group and running.in_flight < self._window and running.runs_on:
                slots.append(running)
        return slots

    def _decode_group(self, group: int, slots: list[Running], session: int) -> Step:
        board = self._board
        step = Step(board.next_step, DECODE, session, group, self.groups)
        drafted = 0
        if session:
            drafted = sum(running.live and running.session == session for running in slots)
        if self.chooser is not None:
            step.nodes = self.chooser.choose(drafted, len(slots) - drafted, self.groups == 2)
        replay = self.replay_rows
        for running in slots:
            if running.gone:
                continue  # preempted by an entry before
            nodes = self._nodes(running, step.nodes) if step.nodes > 1 and session else 1
            if session and running.session == session and not running.live:
                rows = self._replay(running, step.number, replay)
                replay -= rows
            else:
                rows = 0
            nodes = self._reserve(running, nodes)
            if nodes:
                step.entries.append(running)
                step.nodes_of.append(nodes)
                step.replays.append(rows)
        if any(running.gone for running in step.entries):
            _drop_gone(step)
        step.drafted = sum(nodes > 1 for nodes in step.nodes_of)
        oldest = step.number - self.most_in_flight
        step.after = max((r.last_step for r in step.entries), default=0)
        step.after = max(step.after, oldest)
        return step

    def _nodes(self, running: Running, nodes: int) -> int:
        """Rows of one slot: drafts beyond what it may still draw are of no use."""
        if not running.live:
            return 1
        left = running.limit - running.tokens - running.yields
        nodes, chooser = min(nodes, running.most_nodes), self.chooser
        if left == 1 or chooser is None:
            return 1
        if not chooser.pinned and nodes <= self.block_size:
            return min(nodes, left)
        return nodes

    def _replay(self, running: Running, step: int, left: int) -> int:
        """Context rows beyond the step's own that a slot that is behind may publish."""
        if running.rewind_at:
            if step < running.rewind_at:
                return 0
            self._hooks.rewind(running)
        most = running.start + running.decodes * self.block_size
        rows = min(max(most - running.cursor, self.block_size), left)
        running.cursor = min(running.cursor + rows + 1, most)
        return rows

    def _reserve(self, running: Running, nodes: int) -> int:
        """Pages for `nodes` rows; fewer rows, or fewer requests, where there is no room. 0: the
        slot itself was preempted."""
        board = self._board
        raise_to = board.ledger.raise_to
        while not raise_to(running.slot, running.positions(nodes, self.block_size)):
            if nodes > 1:
                nodes = 1
                continue
            youngest = board.youngest()
            self._hooks.preempt(youngest)
            if youngest is running:
                return 0
        return nodes

    # Ping-pong

    def _smaller_group(self) -> int:
        if self.groups == 1:
            return 0
        ones = sum(running.wanted for running in self._board.decoding)
        return int(2 * ones < len(self._board.decoding))

    def _regroup(self, session: int) -> None:
        """Decides the number of groups, and who is to change over."""
        slots = self._board.decoding
        if self.pingpong is not None and self.chooser is not None:
            nodes = self.chooser.current(-(-len(slots) // self.groups), self.groups == 2)
            self.groups = self.pingpong.groups(len(slots), nodes, session != 0)
        if self.groups == 1:
            for running in slots:
                running.wanted = 0
            return
        ones = sum(running.wanted for running in slots)
        surplus = len(slots) - 2 * ones  # of group 0 over group 1
        if abs(surplus) < 2:
            return
        larger, moves = int(surplus < 0), abs(surplus) // 2
        for running in reversed(slots):
            if moves and running.wanted == larger:
                running.wanted = 1 - larger
                moves -= 1


def _drop_gone(step: Step) -> None:
    """Takes out the entries that were preempted while the step was put together."""
    kept = [index for index, running in enumerate(step.entries) if not running.gone]
    step.entries = [step.entries[index] for index in kept]
    step.nodes_of = [step.nodes_of[index] for index in kept]
    step.replays = [step.replays[index] for index in kept]
