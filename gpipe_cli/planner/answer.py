"""What was asked for: a plan, and what was found on the way to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .plan import Plan


@dataclass(frozen=True)
class Answer:
    """What was found.

    Attributes:
        plan: of it.
        found: the keys that were looked for and their values; empty for a plain plan.
        tried: plans that were made on the way.
    """

    plan: Plan
    found: dict[str, Any] = field(default_factory=dict)
    tried: int = 1

    @property
    def lines(self) -> list[str]:
        """In words, for the terminal."""
        if not self.found:
            return []
        words = " ".join(f"{key}={value}" for key, value in self.found.items())
        return [f"found after {self.tried} plans: {words}"]

    def to_json(self) -> dict[str, Any]:
        return {**self.plan.to_json(), "found": self.found, "tried": self.tried}
