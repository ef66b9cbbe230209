"""Defines the task of translation (paper, section 5): label-smoothed loss with clipped logits, decoding, BLEU."""

import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from ..errors import ConfigurationError
from ..typed_section import Positive, ShareOrZero
from .base import GenerationSettings
from .language_model import LanguageModelTask

# sacreBLEU's own choice, and languages that are written without spaces, whose sentences 13a takes for one word.
TOKENIZERS = {
    **dict.fromkeys(("zh", "zho", "chi", "cn", "cmn", "yue", "wuu", "lzh", "hak", "gan", "nan", "hsn", "cdo"), "zh"),
    **dict.fromkeys(("ja", "jpn", "jp"), "ja-mecab"),
    **dict.fromkeys(("ko", "kor"), "ko-mecab"),
    **dict.fromkeys(("th", "tha", "nod", "tts", "lo", "lao", "km", "khm", "my", "mya", "bur", "shn", "mnw"), "char"),
    **dict.fromkeys(("bo", "bod", "tib", "dz", "dzo", "ii", "iii"), "char"),
}
LIBRARIES = {"ja-mecab": "MeCab", "ko-mecab": "mecab_ko"}


def tokenizer_for(language: str | None) -> str:
    """Returns the name of sacreBLEU's tokenizer for a language, by the first part of the language's code.

    "char" stands in for a tokenizer whose library is not installed.
    """
    name = TOKENIZERS.get(re.split("[-_]", language or "")[0].lower(), "13a")
    return name if name not in LIBRARIES or find_spec(LIBRARIES[name]) else "char"


def corpus_bleu(hypotheses: Sequence[str], references: Sequence[str], tokenizer: str = "13a") -> tuple[float, str]:
    """Returns (BLEU from 0 to 100, sacreBLEU's signature) of detokenised, cased sentences with one reference each."""
    from sacrebleu.metrics.bleu import BLEU  # imported late: it takes longer than some whole runs

    metric = BLEU(force=True, tokenize=tokenizer)  # force=True only silences a warning about text that looks tokenised
    score = metric.corpus_score(list(hypotheses), [list(references)])
    return float(score.score), str(metric.get_signature())


class TranslationTask(LanguageModelTask):
    """Adds decoding and BLEU to the loss of a language model. Targets are the decoder's inputs shifted by one token.

    Args:
        label_smoothing, logit_clip, pad_id: arguments of `LanguageModelTask`.
        generation: the keys of `GenerationSettings`; None: an evaluation translates nothing.
    """

    def __init__(
        self,
        label_smoothing: ShareOrZero = 0.1,
        logit_clip: Positive | None = 25.0,
        pad_id: int | None = 0,
        generation: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(label_smoothing, logit_clip, pad_id)
        self.generation = None if generation is None else GenerationSettings(**generation)
        made = self.generation
        chosen, language = (None, None) if made is None else (made.bleu_tokenizer, made.language)
        self._tokenizer = chosen or tokenizer_for(language)
        if chosen in LIBRARIES and not find_spec(LIBRARIES[chosen]):
            raise ConfigurationError(
                f"task.generation.bleu_tokenizer={chosen} needs a library: pip install 'sacrebleu[{chosen[:2]}]'"
            )

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Returns float32 [b, V] of each hypothesis' next token, from the last position of logits [b, t, V].

        Padding gets −∞: it must never be generated.
        """
        last = logits[:, -1].float().log_softmax(-1)
        if self.pad_id is not None:
            last[:, self.pad_id] = -float("inf")
        return last

    def signature(self) -> str:
        """Returns sacreBLEU's signature, which describes how scores are counted."""
        return corpus_bleu(["a"], ["a"], self._tokenizer)[1]

    def score(
        self, hypotheses: Sequence[str], references: Sequence[str], groups: Sequence[str] | None = None
    ) -> dict[str, float]:
        """Returns `bleu` of all sentences together and, with `groups`, `bleu/<name>` of each group.

        Args:
            groups: the name of each sentence's group, such as its language; None: no groups.

        Raises:
            ValueError: there are no sentences, or the lists differ in length.
        """
        members: dict[str, tuple[list[str], list[str]]] = {"bleu": (list(hypotheses), list(references))}
        for hypothesis, reference, group in zip(hypotheses, references, groups or (), strict=groups is not None):
            for side, text in zip(members.setdefault(f"bleu/{group}", ([], [])), (hypothesis, reference), strict=True):
                side.append(text)
        return {name: corpus_bleu(*sides, self._tokenizer)[0] for name, sides in members.items()}
