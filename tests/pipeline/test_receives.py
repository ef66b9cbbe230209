"""Tests that receives are posted when they are due, in order, and once their shapes are known."""

from __future__ import annotations

from gpipe_cli.pipeline.messages.receives import Receives
from gpipe_cli.schedule.instruction import Instruction


def parsed(text: str) -> list[Instruction]:
    return [Instruction.parse(each) for each in text.split()]


def test_a_receive_whose_shapes_are_not_known_keeps_its_place() -> None:
    first, second, third = parsed("ra1.0 ra1.1 ra1.2")
    known: set[Instruction] = {second}
    posted = []

    def post(instruction: Instruction) -> str | None:
        if instruction not in known:
            return None
        posted.append(instruction)
        return str(instruction)

    receives = Receives({0: [first, second], 4: [third]}, post)
    receives.post_due(0)
    assert posted == [] and receives.take(first) is None, "the caller posts it"
    receives.post_due(1)
    assert posted == [second] and receives.take(second) == "ra1.1"
    known.add(third)
    receives.post_due(3)
    assert not receives
    receives.post_due(4)
    assert receives and receives.take(third) == "ra1.2" and not receives
