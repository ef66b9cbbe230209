"""Checks instruction lists against the rules of a synchronous pipeline (paper, section 2.2)."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from gpipe_cli.schedule.instruction import BACK, Instruction, InstructionLists, Message, Op, execution_order
from gpipe_cli.schedule.schedule import kept_graphs, schedule

Policy = str | int | Sequence[int]


def scheduled(kind: str, placement: Sequence[int], M: int, policy: Policy) -> list[list[Instruction]]:
    """Returns the lists of a training step, by a policy as `kept_graphs` takes it."""
    return schedule(kind, placement, M, kept_graphs(policy, len(placement), M))


def check_rules(lists: InstructionLists, placement: Sequence[int], M: int, policy: Policy | None = None) -> None:
    """Checks the lists of one step.

    * Every cell runs every micro-batch forward once and backward once, whole or in its two halves, on its own worker.
      What an instruction needs has run before it.
    * Between two workers the messages of one direction are received in the order in which they are sent.
    * The workers never wait for each other in a circle, with at most `send_window` messages on their way.
    * Of a cell with n kept graphs at most n exist at any moment, and one where n is 0.

    Args:
        policy: None for a forward-only step.

    Raises:
        ScheduleError: workers wait for ever.
        AssertionError: another rule is broken; names the instruction.
    """
    done: set[Instruction] = set()
    ways: dict[tuple[int, int, str], tuple[list[Message], list[Message]]] = defaultdict(lambda: ([], []))
    for worker, i in execution_order(lists):
        assert placement[i.cell] == worker and i not in done, i
        assert all(any(one in done for one in needed) for needed in _needs(i, placement)), i
        assert i.op not in (*BACK, Op.RECOMPUTE) or not any(one in done for one in _back(i.cell, i.micro_batch)), i
        done.add(i)
        for end, message in enumerate((i.sent_message, i.awaited_message)):
            if message is not None:
                sender, receiver = placement[message.sender], placement[message.receiver]
                assert sender != receiver, i
                ways[sender, receiver, message.direction][end].append(message)
    assert all(sent == received for sent, received in ways.values()), "messages received in another order than sent"
    cells = range(len(placement))
    ops = {(op, cell, m): Instruction(op, cell, m) in done for op in Op for cell in cells for m in range(M)}
    assert sum(ops.values()) == len(done), "a cell or a micro-batch that does not exist"
    for cell in cells:
        for m in range(M):
            assert ops[Op.FORWARD, cell, m], f"no forward {cell}.{m}"
            has_backward = ops[Op.BACKWARD, cell, m] or ops[Op.WEIGHT_GRADIENT, cell, m]
            assert (policy is not None) == has_backward, f"{cell}.{m}"
            assert ops[Op.WEIGHT_GRADIENT, cell, m] == ops[Op.INPUT_GRADIENT, cell, m], f"half a backward {cell}.{m}"
    if policy is not None:
        keep = kept_graphs(policy, len(placement), M)
        for instructions in lists:
            _check_graphs(instructions, keep)
        for (op, cell, m), is_there in ops.items():
            if op is Op.RECOMPUTE and (keep[cell] == 0 or keep[cell] >= max(M, 2)):
                assert is_there == (keep[cell] == 0), f"recompute {cell}.{m}"


def _check_graphs(instructions: Sequence[Instruction], keep: Sequence[int]) -> None:
    recomputed = {(i.cell, i.micro_batch) for i in instructions if i.op is Op.RECOMPUTE}
    graphs: Counter[int] = Counter()
    for i in instructions:
        made = i.op is Op.RECOMPUTE or (i.op is Op.FORWARD and (i.cell, i.micro_batch) not in recomputed)
        graphs[i.cell] += made - (i.op in BACK)
        assert graphs[i.cell] <= max(keep[i.cell], 1), f"too many graphs at {i}"


def _back(cell: int, m: int) -> list[Instruction]:
    """Returns the instructions of which either makes the gradient of the cell's input."""
    return [Instruction(op, cell, m) for op in BACK]


def _needs(i: Instruction, placement: Sequence[int]) -> Iterator[list[Instruction]]:
    """Yields what must have run before an instruction; of each list one."""
    cell, m = i.cell, i.micro_batch
    if i.op is Op.FORWARD and cell > 0:
        local = placement[cell - 1] == placement[cell]
        yield [Instruction(Op.FORWARD, cell - 1, m) if local else Instruction(Op.RECEIVE_ACTIVATION, cell, m)]
    if i.op in (Op.RECOMPUTE, Op.SEND_ACTIVATION, *BACK):
        yield [Instruction(Op.FORWARD, cell, m)]
    if i.op in BACK and cell + 1 < len(placement):
        local = placement[cell + 1] == placement[cell]
        yield _back(cell + 1, m) if local else [Instruction(Op.RECEIVE_GRADIENT, cell, m)]
    if i.op is Op.WEIGHT_GRADIENT:
        yield [Instruction(Op.INPUT_GRADIENT, cell, m)]
    if i.op is Op.SEND_GRADIENT:
        yield _back(cell, m)
