"""Lists the 102 languages of the CLDR corpus, from the best to the least resourced, and their sizes."""

import csv
from collections.abc import Sequence
from pathlib import Path

from ...errors import ConfigurationError

# languages.csv lists the languages with at least 250 territory, 150 language, 150 currency and 250 time-zone names, 75
# units, all relative times and their own months, weekdays and lists in CLDR 47; copies are left out (ht is French, nb
# no, trw mostly Urdu). The order follows how well a language is resourced. Most of the last 26 are relatives of better
# resourced ones, to show transfer; a few have no relatives here (qu, kab, chr, yrl).
with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as _table:
    LANGUAGES = tuple(row["code"] for row in csv.DictReader(_table))
RANK = {code: rank for rank, code in enumerate(LANGUAGES)}  # which decides how many pairs a language gets


def name_of(code: str) -> str:
    """Returns the English name of a language, as "German"; "" for a code that CLDR does not know."""
    from babel import Locale

    try:
        return Locale.parse(code.replace("-", "_")).english_name or ""
    except Exception:  # babel raises several for what is no code
        return ""


def check_languages(codes: Sequence[str] | None) -> list[str]:
    """Returns the chosen codes in the table's order; None: all 102.

    Raises:
        ConfigurationError: a code is not in the table.
    """
    if codes is None:
        return list(LANGUAGES)
    for code in codes:
        if code not in RANK:
            raise ConfigurationError(
                f"data.languages: no language '{code}' in the corpus, which has {' '.join(LANGUAGES)}"
            )
    return sorted(set(codes), key=RANK.__getitem__)


def corpus_size(code: str, largest: int, smallest: int) -> int:
    """Returns the training pairs of a language: a straight line on a logarithmic scale over the ranks.

    The paper's sizes fall in the same way (section 5). A size does not depend on the languages chosen, so that a
    bilingual baseline trains on the same pairs as the multilingual run.
    """
    share: float = (smallest / largest) ** (RANK[code] / (len(LANGUAGES) - 1))
    return round(largest * share)
