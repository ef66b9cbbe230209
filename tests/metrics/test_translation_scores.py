"""Tests BLEU by language and level of resource."""

import sacrebleu

from gpipe_cli.metrics.translation_scores import languages_of, with_averages
from gpipe_cli.tasks.translation import TranslationTask

REFERENCES = ["the cat sat on the mat", "two dogs ran over there today", "a bird sang in the old tree", "it rains"]
HYPOTHESES = ["the cat sat on a mat", "two dogs ran over there today", "a bird sings in the tree", "it is raining"]
LANGUAGES = ["ru", "de", "sw", "de"]
SIZES = {"sw": 10, "de": 1000, "ru": 200}


def bleu(*numbers: int) -> float:
    return sacrebleu.corpus_bleu([HYPOTHESES[i] for i in numbers], [[REFERENCES[i] for i in numbers]]).score


def numbers() -> dict[str, float]:
    return with_averages(TranslationTask().score(HYPOTHESES, REFERENCES, LANGUAGES), SIZES)


def test_each_language_is_scored_as_sacrebleu_scores_its_sentences_alone() -> None:
    assert languages_of(numbers()) == {"de": bleu(1, 3), "ru": bleu(0), "sw": bleu(2)}


def test_levels_are_averaged() -> None:
    found = numbers()
    assert [found[f"bleu_{level}"] for level in ("high", "middle", "low")] == [bleu(1, 3), bleu(0), bleu(2)]


def test_a_language_with_few_sentences_counts_in_no_average() -> None:
    found = with_averages({"bleu/de": 10.0, "bleu/ru": 20.0, "bleu/sw": 90.0}, SIZES, few=["sw"])
    assert (found["bleu_average"], found["bleu_middle"]) == (15.0, 20.0) and "bleu_low" not in found
