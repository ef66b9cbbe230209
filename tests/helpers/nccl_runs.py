"""Draws runs of two training steps as the calls of their ranks, for the model of NCCL's rules."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from nccl_rules import Call, Rules
from schedule_rules import scheduled

from gpipe_cli.distributed.exchange import family
from gpipe_cli.pipeline.messages.process_group import routes
from gpipe_cli.schedule.instruction import COMPUTE, Instruction, InstructionLists, Message
from gpipe_cli.schedule.orders import KINDS, ROUND_ROBIN
from gpipe_cli.schedule.posting import Posts, post_when_sent
from gpipe_cli.schedule.schedule import REMAT, gradients_complete

Extra = Callable[[int, Instruction], Iterable[Call]]
TIED = "activations to later ranks"  # the group whose communicators carry tied weights


def engine_calls(
    instructions: Sequence[Instruction], placement: tuple[int, ...], posts: Posts, extra: Extra = lambda *_: ()
) -> list[Call]:
    """Returns the calls of a worker that runs the list; workers are ranks, and each way has a group of its own.

    Args:
        extra: returns what else is called after an instruction, given with its position.
    """
    calls: list[Call] = []
    for position, instruction in enumerate(instructions):
        for receive in posts.get(position, ()):
            assert receive.awaited_message is not None
            calls.append(message_call("receive", receive.awaited_message, placement))
        if instruction.op in COMPUTE:
            calls.append(Call("compute", instruction))
        elif instruction.sent_message is not None:
            calls.append(message_call("send", instruction.sent_message, placement))
        else:
            calls.append(Call("await", instruction.awaited_message))
        calls += extra(position, instruction)
    return calls


@cache
def message_call(kind: str, message: Message, placement: tuple[int, ...]) -> Call:
    """Returns the call that begins to send or receive a message, in the group that `connect_workers` gives it."""
    sender, receiver = placement[message.sender], placement[message.receiver]
    return Call(kind, message, _pair(sender, receiver), _group(message.direction, sender, receiver))


def _pair(one: int, other: int) -> tuple[int, int]:
    return min(one, other), max(one, other)


def _group(direction: str, sender: int, receiver: int) -> str:
    return f"{direction}s to {'later' if sender < receiver else 'earlier'} ranks"


def programs(lists: InstructionLists, placement: tuple[int, ...]) -> list[list[Call]]:
    posts = post_when_sent(lists)
    return [engine_calls(instructions, placement, due) for instructions, due in zip(lists, posts, strict=True)]


@cache
def training(kind: str, placement: tuple[int, ...], M: int, remat: str) -> tuple[InstructionLists, list[Posts]]:
    lists = scheduled(kind, placement, M, remat)
    return lists, post_when_sent(lists)


@dataclass(frozen=True)
class Run:
    """Describes a run of D replicas of W workers.

    Attributes:
        ties: of each tied weight the workers of its uses, the owner's first, in layer order.
        sums: collectives in which a cell's gradients are summed.
    """

    kind: str
    placement: tuple[int, ...]
    workers: int
    M: int
    remat: str
    replicas: int
    ties: tuple[tuple[int, ...], ...]
    sums: int

    def calls(self, rank: int) -> Iterator[Call]:
        """Yields the calls of a rank, from the first connections to the last exchange."""
        yield from self._first_messages(rank)
        yield from self._spread("beginning", rank)
        yield from self._exchange("first plan", rank)
        for number in range(2):
            yield from self._training(f"step {number}", rank)

    # -- phases ------------------------------------------------------------------------------------------------

    def _first_messages(self, rank: int) -> Iterator[Call]:
        """Yields the messages that make the connections (`ProcessGroupTransport.exchange_first_messages`)."""
        first = rank - rank % self.workers
        for direction, sender, receiver in routes(tuple(first + worker for worker in self.placement)):
            for size in (1, 2):
                name = ("first message", direction, sender, receiver, size)
                yield from _message(name, rank, sender, receiver, _group(direction, sender, receiver))
        yield Call("read", "connections")

    def _training(self, phase: str, rank: int) -> Iterator[Call]:
        worker, first = rank % self.workers, rank - rank % self.workers
        group = self._replica_ranks(rank)
        lists, posts = training(self.kind, self.placement, self.M, self.remat)
        complete = gradients_complete(lists[worker])

        def extra(position: int, i: Instruction) -> Iterator[Call]:
            if position in complete:
                for number in range(self.sums):  # only begun; with three replicas the first of two messages
                    yield Call("collective", (phase, "sum", i.cell, number), group, "replicas")

        sent = []
        for call in _as_rank(engine_calls(lists[worker], self.placement, posts[worker], extra), phase, first):
            yield call
            if call.kind == "send":
                sent.append(Call("await", call.name, group="sent"))
        yield from sent
        yield Call("read", (phase, "times"))
        yield from self._reductions(phase, rank, list(complete.values()), group)
        yield from self._exchange(f"report of {phase}", rank)
        yield Call("compute", (phase, "update"))
        yield from self._spread(phase, rank)

    def _reductions(self, phase: str, rank: int, cells: Sequence[int], group: tuple[int, ...]) -> Iterator[Call]:
        """Yields the sums behind a step: over the uses of tied weights, over replicas, and the gradients' norms."""
        first = rank - rank % self.workers
        for tie, (owner, *others) in enumerate(self.ties):
            for number, user in enumerate(others):
                if user != owner:
                    name = (phase, "tied gradient", tie, number, first)
                    yield from _message(name, rank, first + user, first + owner, TIED)
        if self.ties and group:
            yield from _collective((phase, "sums of tied gradients", rank % self.workers), group)
        for cell in cells if group else ():
            for number in range(self.sums):
                yield Call("await", (phase, "sum", cell, number))
                if self.replicas > 2:
                    yield from _collective((phase, "gather", cell, number), group)
        yield Call("compute", (phase, "norms"))
        yield Call("read", (phase, "norms"))

    def _spread(self, phase: str, rank: int) -> Iterator[Call]:
        """Yields the messages that give each worker the values of tied weights (`TiedParameters.spread`)."""
        first = rank - rank % self.workers
        for tie, (owner, *others) in enumerate(self.ties):
            for user in dict.fromkeys(other for other in others if other != owner):
                yield from _message((phase, "tied weight", tie, user, first), rank, first + owner, first + user, TIED)

    # -- between ranks -----------------------------------------------------------------------------------------

    def _replica_ranks(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks with the same cells; none where there are no replicas."""
        if self.replicas == 1:
            return ()
        return tuple(range(rank % self.workers, self.workers * self.replicas, self.workers))

    def _exchange(self, name: str, rank: int) -> Iterator[Call]:
        """Yields an exchange over the tree of all ranks, from host to host."""
        parent, children = family(rank, self.workers * self.replicas)
        for child in children:
            yield Call("hear", (name, "up from", child), (child,))
        if parent is not None:
            yield Call("tell", (name, "up from", rank), (parent,))
            yield Call("hear", (name, "down from", parent), (parent,))
        yield Call("tell", (name, "down from", rank), tuple(children))


def _as_rank(calls: Iterable[Call], phase: str, first: int) -> Iterator[Call]:
    """Yields the calls of a step for the replica whose first rank is given; those of collectives stay."""
    for call in calls:
        if call.group == "replicas" or (
            call.kind == "await" and isinstance(call.name, tuple) and call.name[0] == phase
        ):
            yield call
        else:
            ranks = tuple(first + worker for worker in call.ranks) if first else call.ranks
            yield Call(call.kind, (phase, first, call.name), ranks, call.group, call.bytes)


def _collective(name: tuple[object, ...], group: tuple[int, ...]) -> Iterator[Call]:
    """Yields a collective for which later computations wait; nothing without replicas."""
    if group:
        yield Call("collective", name, group, "replicas")
        yield Call("await", name)


def _message(name: tuple[object, ...], rank: int, sender: int, receiver: int, group: str) -> Iterator[Call]:
    """Yields a message for which later computations of both ends wait; nothing on other ranks."""
    if rank in (sender, receiver):
        sends = rank == sender
        yield Call("send" if sends else "receive", name, _pair(sender, receiver), group)
        yield Call("await", name, group="sent" if sends else "")


def drawn_run(seed: int) -> tuple[list[list[Call]], Rules]:
    """Draws a run, and the rules of its devices."""
    draw = random.Random(seed)
    kind = draw.choice(list(KINDS))
    workers = draw.choice((2, 2, 3, 3, 4, 4, 5, 8, 16))
    M = draw.choice((1, 2, 3, 4, 5, 7, 8) if draw.random() < 0.95 else (16, 33, 64))
    rounds = draw.choice((1, 2, 3)) if kind in ROUND_ROBIN and workers <= 5 else 1
    replicas = draw.choice((1, 1, 2, 3)) if workers < 5 else 1
    placement = tuple(range(workers)) * rounds
    cells = range(len(placement))
    ties = tuple(
        tuple(placement[cell] for cell in sorted(draw.choices(cells, k=draw.choice((2, 3)))))
        for _ in range(draw.choice((0, 0, 1, 2)))
    )
    run = Run(
        kind=kind,
        placement=placement,
        workers=workers,
        M=M,
        remat=draw.choice(REMAT),
        replicas=replicas,
        ties=ties,
        sums=draw.choice((1, 1, 2)) if replicas > 1 else 0,
    )
    rules = Rules(
        buffer=draw.choice((0, 0, 1, 3)),
        occupies=draw.random() < 0.7,
        hidden_syncs=draw.choice((0.0, 0.3, 1.0)),
        connected=draw.random() < 0.3,
        pairs=draw.random() < 0.6,
    )
    return [list(run.calls(rank)) for rank in range(workers * replicas)], rules
