"""Tests BLEU by language and level of resource."""

import pytest
import sacrebleu

from gpipe_cli.metrics.translation_scores import languages_of, resource_levels, with_averages
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


def test_one_language_needs_no_averages() -> None:
    scores = {"bleu": 20.0, "bleu/de": 20.0}
    assert with_averages(scores, SIZES) == scores


@pytest.mark.parametrize(("count", "thirds"), [(3, (1, 1, 1)), (4, (2, 1, 1)), (5, (2, 2, 1)), (102, (34, 34, 34))])
def test_thirds_differ_by_at_most_one_language(count: int, thirds: tuple[int, int, int]) -> None:
    levels = list(resource_levels({str(place): count - place for place in range(count)}).values())
    assert levels == ["high"] * thirds[0] + ["middle"] * thirds[1] + ["low"] * thirds[2]
