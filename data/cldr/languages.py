"""Lists the 102 languages of the CLDR corpus, from the best to the least resourced, and their sizes."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import NamedTuple


class Language(NamedTuple):
    """Describes a language; its place in `LANGUAGES` is its rank, which decides how many pairs it gets."""

    code: str
    name: str
    script: str
    family: str


# Languages with at least 250 territory, 150 language, 150 currency and 250 time-zone names, 75 units, all relative
# times and their own months, weekdays and lists in CLDR 47; copies are left out (ht is French, nb no, trw mostly Urdu).
# The order follows how well a language is resourced. Most of the last 26 are relatives of better resourced ones, to
# show transfer; a few have no relatives here (qu, kab, chr, yrl).
LANGUAGES: tuple[Language, ...] = (
    Language("es", "Spanish", "Latin", "Romance"),
    Language("fr", "French", "Latin", "Romance"),
    Language("de", "German", "Latin", "Germanic"),
    Language("pt", "Portuguese", "Latin", "Romance"),
    Language("ru", "Russian", "Cyrillic", "Slavic"),
    Language("it", "Italian", "Latin", "Romance"),
    Language("ja", "Japanese", "Japanese", "Other"),
    Language("zh", "Chinese", "Chinese", "Other"),
    Language("nl", "Dutch", "Latin", "Germanic"),
    Language("ko", "Korean", "Hangul", "Other"),
    Language("pl", "Polish", "Latin", "Slavic"),
    Language("ar", "Arabic", "Arabic", "Semitic"),
    Language("tr", "Turkish", "Latin", "Turkic"),
    Language("sv", "Swedish", "Latin", "Germanic"),
    Language("cs", "Czech", "Latin", "Slavic"),
    Language("da", "Danish", "Latin", "Germanic"),
    Language("no", "Norwegian", "Latin", "Germanic"),
    Language("fi", "Finnish", "Latin", "Uralic"),
    Language("el", "Greek", "Greek", "Other"),
    Language("hu", "Hungarian", "Latin", "Uralic"),
    Language("ro", "Romanian", "Latin", "Romance"),
    Language("vi", "Vietnamese", "Latin", "Other"),
    Language("id", "Indonesian", "Latin", "Austronesian"),
    Language("uk", "Ukrainian", "Cyrillic", "Slavic"),
    Language("he", "Hebrew", "Hebrew", "Semitic"),
    Language("bg", "Bulgarian", "Cyrillic", "Slavic"),
    Language("hi", "Hindi", "Devanagari", "Indo-Aryan"),
    Language("th", "Thai", "Thai", "Other"),
    Language("fa", "Persian", "Arabic", "Iranian"),
    Language("hr", "Croatian", "Latin", "Slavic"),
    Language("sk", "Slovak", "Latin", "Slavic"),
    Language("lt", "Lithuanian", "Latin", "Baltic"),
    Language("sl", "Slovenian", "Latin", "Slavic"),
    Language("et", "Estonian", "Latin", "Uralic"),
    Language("lv", "Latvian", "Latin", "Baltic"),
    Language("sr", "Serbian", "Cyrillic", "Slavic"),
    Language("ca", "Catalan", "Latin", "Romance"),
    Language("ms", "Malay", "Latin", "Austronesian"),
    Language("bn", "Bangla", "Bengali", "Indo-Aryan"),
    Language("mk", "Macedonian", "Cyrillic", "Slavic"),
    Language("sq", "Albanian", "Latin", "Other"),
    Language("is", "Icelandic", "Latin", "Germanic"),
    Language("bs", "Bosnian", "Latin", "Slavic"),
    Language("eu", "Basque", "Latin", "Other"),
    Language("gl", "Galician", "Latin", "Romance"),
    Language("ta", "Tamil", "Tamil", "Dravidian"),
    Language("ml", "Malayalam", "Malayalam", "Dravidian"),
    Language("te", "Telugu", "Telugu", "Dravidian"),
    Language("ka", "Georgian", "Georgian", "Other"),
    Language("az", "Azerbaijani", "Latin", "Turkic"),
    Language("ur", "Urdu", "Arabic", "Indo-Aryan"),
    Language("ne", "Nepali", "Devanagari", "Indo-Aryan"),
    Language("mr", "Marathi", "Devanagari", "Indo-Aryan"),
    Language("mn", "Mongolian", "Cyrillic", "Other"),
    Language("kk", "Kazakh", "Cyrillic", "Turkic"),
    Language("hy", "Armenian", "Armenian", "Other"),
    Language("be", "Belarusian", "Cyrillic", "Slavic"),
    Language("sw", "Swahili", "Latin", "Other"),
    Language("af", "Afrikaans", "Latin", "Germanic"),
    Language("gu", "Gujarati", "Gujarati", "Indo-Aryan"),
    Language("kn", "Kannada", "Kannada", "Dravidian"),
    Language("si", "Sinhala", "Sinhala", "Indo-Aryan"),
    Language("km", "Khmer", "Khmer", "Other"),
    Language("my", "Burmese", "Myanmar", "Other"),
    Language("pa", "Punjabi", "Gurmukhi", "Indo-Aryan"),
    Language("lo", "Lao", "Lao", "Other"),
    Language("am", "Amharic", "Ethiopic", "Semitic"),
    Language("uz", "Uzbek", "Latin", "Turkic"),
    Language("so", "Somali", "Latin", "Other"),
    Language("ha", "Hausa", "Latin", "Other"),
    Language("cy", "Welsh", "Latin", "Celtic"),
    Language("ga", "Irish", "Latin", "Celtic"),
    Language("ps", "Pashto", "Arabic", "Iranian"),
    Language("sd", "Sindhi", "Arabic", "Indo-Aryan"),
    Language("ky", "Kyrgyz", "Cyrillic", "Turkic"),
    Language("tk", "Turkmen", "Latin", "Turkic"),
    Language("as", "Assamese", "Bengali", "Indo-Aryan"),
    Language("or", "Odia", "Oriya", "Indo-Aryan"),
    Language("jv", "Javanese", "Latin", "Austronesian"),
    Language("ti", "Tigrinya", "Ethiopic", "Semitic"),
    Language("gd", "Scottish Gaelic", "Latin", "Celtic"),
    Language("br", "Breton", "Latin", "Celtic"),
    Language("lb", "Luxembourgish", "Latin", "Germanic"),
    Language("nn", "Norwegian Nynorsk", "Latin", "Germanic"),
    Language("fo", "Faroese", "Latin", "Germanic"),
    Language("ast", "Asturian", "Latin", "Romance"),
    Language("oc", "Occitan", "Latin", "Romance"),
    Language("qu", "Quechua", "Latin", "Other"),
    Language("cv", "Chuvash", "Cyrillic", "Turkic"),
    Language("bew", "Betawi", "Latin", "Austronesian"),
    Language("pcm", "Nigerian Pidgin", "Latin", "Germanic"),
    Language("kab", "Kabyle", "Latin", "Other"),
    Language("kok", "Konkani", "Devanagari", "Indo-Aryan"),
    Language("sc", "Sardinian", "Latin", "Romance"),
    Language("vec", "Venetian", "Latin", "Romance"),
    Language("lij", "Ligurian", "Latin", "Romance"),
    Language("hsb", "Upper Sorbian", "Latin", "Slavic"),
    Language("dsb", "Lower Sorbian", "Latin", "Slavic"),
    Language("frr", "Northern Frisian", "Latin", "Germanic"),
    Language("chr", "Cherokee", "Cherokee", "Other"),
    Language("ccp", "Chakma", "Chakma", "Indo-Aryan"),
    Language("yrl", "Nheengatu", "Latin", "Other"),
)

RANK: dict[str, int] = {language.code: rank for rank, language in enumerate(LANGUAGES)}
SCRIPTS: dict[str, str] = {language.code: language.script for language in LANGUAGES}


def check_languages(codes: Sequence[str] | None) -> list[str]:
    """Returns the chosen codes in the table's order; None: all 102.

    Raises:
        ValueError: a code is not in the table; the message names the nearest ones.
    """
    if codes is None:
        return [language.code for language in LANGUAGES]
    for code in codes:
        if code not in RANK:
            raise ValueError(f"data.languages: no language '{code}' in the corpus{_nearest(code)}")
    if not codes:
        raise ValueError("data.languages is empty: give codes such as [de,fr], or null for all 102")
    return sorted(set(codes), key=RANK.__getitem__)


def _nearest(code: object) -> str:
    if code is False:
        return ": YAML reads the bare word no as false, so write Norwegian as 'no'"
    by_name = {language.name.lower(): language.code for language in LANGUAGES}
    words = difflib.get_close_matches(str(code).lower(), [*by_name, *RANK], n=4, cutoff=0.5)
    near = dict.fromkeys(by_name.get(word, word) for word in words)
    return f"; near: {', '.join(near)}" if near else "; docs/data.md lists all 102"


def corpus_size(code: str, largest: int, smallest: int) -> int:
    """Returns the training pairs of a language: a straight line on a logarithmic scale over the ranks.

    The paper's sizes fall in the same way (section 5). A size does not depend on the languages chosen, so that a
    bilingual baseline trains on the same pairs as the multilingual run.
    """
    share: float = (smallest / largest) ** (RANK[code] / (len(LANGUAGES) - 1))
    return round(largest * share)
