"""Tests losses and metrics by literal numbers, and against torch's and sacreBLEU's own."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gpipe_cli.errors import ConfigurationError
from gpipe_cli.tasks.classification import ClassificationTask
from gpipe_cli.tasks.language_model import LanguageModelTask
from gpipe_cli.tasks.translation import TranslationTask, corpus_bleu

LN2 = math.log(2)
HALF_QUARTER_QUARTER = [math.log(0.5), math.log(0.25), math.log(0.25)]


def logits_of(*rows: list[float]) -> Tensor:
    """Returns the logits of one sentence: [1, t, V]."""
    return torch.tensor([rows], dtype=torch.float64, requires_grad=True)


def random_batch(sentences: int = 6, length: int = 5, words: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(sentences, length, words, dtype=torch.float64, generator=generator)
    targets = torch.randint(0, words, (sentences, length), generator=generator)  # 0 is padding
    return logits, targets


# -- the loss of tokens ----------------------------------------------------------------------------------------------


def test_logits_are_clipped_hard_and_get_no_gradient_outside() -> None:
    logits = logits_of([30.0, 0.0, -26.0, 25.0])
    loss, statistics = TranslationTask(label_smoothing=0.0, logit_clip=25.0).loss((logits,), (torch.tensor([[1]]),))
    loss.backward()
    assert loss.item() == pytest.approx(25 + LN2, rel=1e-9)
    assert logits.grad is not None
    assert logits.grad[0, 0].tolist() == pytest.approx([0.0, -1.0, 0.0, 0.5], abs=1e-9)
    assert statistics.tolist() == [2.0, 4.0]


@pytest.mark.parametrize("clip", [None, 2.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradient_equal_torchs_cross_entropy(smoothing: float, clip: float | None) -> None:
    logits, targets = random_batch()
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss, _ = TranslationTask(smoothing, clip).loss((ours,), (targets,))
    clipped = theirs if clip is None else theirs.clamp(-clip, clip)
    how = {"reduction": "sum", "ignore_index": 0, "label_smoothing": smoothing}
    wanted = F.cross_entropy(clipped.flatten(0, 1), targets.flatten(), **how)
    (3 * loss).backward()
    (3 * wanted).backward()
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("task", [TranslationTask(logit_clip=2.0), LanguageModelTask(pad_id=None)])
@pytest.mark.parametrize("sizes", [[6], [1, 5], [2, 2, 2], [4, 0, 2]], ids=str)
def test_sums_do_not_depend_on_the_split_in_micro_batches(task: TranslationTask, sizes: list[int]) -> None:
    logits, targets = random_batch()
    pieces = list(zip(logits.split(sizes), targets.split(sizes), strict=True))

    def totals(micro_batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        losses = [task.loss((x,), (y,)) for x, y in micro_batches]
        metrics = [task.evaluate((x,), (y,)) for x, y in micro_batches]
        weight = sum(task.weight((y,)) for _, y in micro_batches)
        return [sum(loss for loss, _ in losses), sum(s for _, s in losses), sum(metrics), torch.tensor(weight)]  # type: ignore[list-item]

    torch.testing.assert_close(totals(pieces), totals([(logits, targets)]), rtol=1e-12, atol=1e-12)


def test_half_precision_logits_are_widened_for_the_loss() -> None:
    logits, targets = random_batch()
    narrow = logits.bfloat16().requires_grad_()
    loss, _ = TranslationTask().loss((narrow,), (targets,))
    wanted, _ = TranslationTask().loss((narrow.detach().float(),), (targets,))
    loss.backward()
    assert loss.dtype == torch.float32 and loss.item() == wanted.item()
    assert narrow.grad is not None and narrow.grad.dtype == torch.bfloat16


def test_a_padding_id_outside_the_vocabulary_is_fine() -> None:
    logits, targets = random_batch()
    outside = targets.where(targets != 0, -100)
    for function in ("loss", "evaluate"):
        got = getattr(TranslationTask(pad_id=-100), function)((logits,), (outside,))
        torch.testing.assert_close(got, getattr(TranslationTask(pad_id=0), function)((logits,), (targets,)))


# -- metrics of tokens -----------------------------------------------------------------------------------------------


def test_evaluation_neither_smooths_nor_clips() -> None:
    logits = logits_of(HALF_QUARTER_QUARTER, [-40.0, -40.0, 0.0], [0.0, 50.0, 50.0])
    sums = TranslationTask(label_smoothing=0.3, logit_clip=1.0).evaluate((logits,), (torch.tensor([[1, 1, 0]]),))
    assert sums.dtype == torch.float64
    assert sums.tolist() == pytest.approx([2 * LN2 + 40, 0.0])


def test_summaries_are_per_token_with_the_loss_first() -> None:
    summary = TranslationTask().summarize({"nll": 4 * LN2, "correct": 3.0}, 4.0)
    assert list(summary) == ["nll", "accuracy", "perplexity"]
    assert list(summary.values()) == pytest.approx([LN2, 0.75, 2.0])


# -- generation and BLEU ---------------------------------------------------------------------------------------------


def test_padding_is_never_generated() -> None:
    logits = torch.tensor([[[9.0, 1.0, 2.0]]])
    assert TranslationTask(pad_id=0).log_probabilities(logits)[0, 0] == -math.inf
    assert logits[0, 0, 0] == 9.0


HYPOTHESES = ["the cat sat on the mat .", "Monday, 4 May 2020", "a blue house on the hill"]
REFERENCES = ["the cat sat on a mat .", "Monday, May 4, 2020", "a blue house on the hill"]


def test_bleu_is_sacrebleus_with_its_signature() -> None:
    import sacrebleu

    bleu, signature = corpus_bleu(HYPOTHESES, REFERENCES)
    assert bleu == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score
    assert "|tok:13a|" in signature and "|case:mixed|" in signature


@pytest.mark.parametrize(
    ("language", "name"),
    [("zh", "zh"), ("zh-TW", "zh"), ("yue_Hant", "zh"), ("cn", "zh"), ("th", "char"), ("jp", "char"), ("pt_BR", "13a")],
)
def test_the_tokenizer_follows_the_language_and_equal_sentences_score_100(language: str, name: str) -> None:
    generation = {"per_language": 1, "per_language_at_end": 1, "group": 1, "max_length": 9, "language": language}
    task, text = TranslationTask(generation=generation), ["一二三四五六", "猫狗房树河"] if name != "13a" else REFERENCES
    assert task.score(text, text)["bleu"] == pytest.approx(100) and f"|tok:{name}|" in task.signature()
    assert "|tok:none|" in TranslationTask(generation={**generation, "bleu_tokenizer": "none"}).signature()
    with pytest.raises(ConfigurationError, match=r"ko-mecab needs a library: pip install 'sacrebleu\[ko\]'"):
        TranslationTask(generation={**generation, "bleu_tokenizer": "ko-mecab"})


# -- classification --------------------------------------------------------------------------------------------------


def test_classification_counts_first_and_first_five() -> None:
    logits = torch.tensor([[6.0, 5, 4, 3, 2, 1, 0], [6.0, 5, 4, 3, 2, 1, 0], [6.0, 5, 4, 3, 2, 1, 0]])
    sums = ClassificationTask().evaluate((logits,), (torch.tensor([0, 4, 5]),))
    assert sums[1:].tolist() == [1.0, 2.0]


def test_classification_loss_is_a_sum_over_examples() -> None:
    logits = torch.tensor([HALF_QUARTER_QUARTER, HALF_QUARTER_QUARTER], dtype=torch.float64)
    targets = (torch.tensor([0, 1]),)
    task = ClassificationTask(label_smoothing=0.3)
    loss, statistics = task.loss((logits,), targets)
    assert loss.item() == pytest.approx((0.8 * 1 + 0.2 * 2 + 0.1 * 1 + 0.9 * 2) * LN2)
    assert task.weight(targets) == 2
    assert dict(zip(task.statistics, statistics.tolist(), strict=True)) == {"accuracy": 1.0, "examples": 2.0}
    assert task.evaluate((logits,), targets)[0].item() == pytest.approx(3 * LN2)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_shares_of_one_class_alone_are_its_label(smoothing: float) -> None:
    logits, labels = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 3, 1, 1, 2])
    task, shares = ClassificationTask(smoothing), F.one_hot(labels, 4).double()
    for method in (lambda targets: task.loss((logits,), targets)[0], lambda targets: task.evaluate((logits,), targets)):
        torch.testing.assert_close(method((shares,)), method((labels,)))
    assert task.loss((logits,), (0.25 * shares + 0.75 * shares.roll(1, 0),))[1][1] == 5
