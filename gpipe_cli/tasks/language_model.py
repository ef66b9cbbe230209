"""Language models: the next token of a text (paper, section 3: Transformer-L)."""

from __future__ import annotations

from .tokens import TokenPrediction


class LanguageModelTask(TokenPrediction):
    """Outputs: (logits [b, t, V],); targets: (next ids [b, t],).

    Args:
        label_smoothing: ε, spread evenly over the vocabulary; training only.
        logit_clip: logits are clipped hard to [−logit_clip, logit_clip]; training only; None: not at all.
        pad_id: the target that is padding; None where there is none.
    """

    def __init__(
        self, label_smoothing: float = 0.0, logit_clip: float | None = None, pad_id: int | None = None
    ) -> None:
        super().__init__(label_smoothing, logit_clip, pad_id)
