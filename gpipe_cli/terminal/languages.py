"""Draws the quality of translation by language. Imports no torch."""

from collections.abc import Mapping

from gpipe_cli.data.cldr.languages import name_of
from gpipe_cli.svg import Drawing

ROW, COLUMN = 15.0, 430.0  # pixels of a language: height, width
BAR = 190.0  # pixels of the longest bar


def draw_languages(bleu: Mapping[str, float], copying: Mapping[str, float], sentences: Mapping[str, int]) -> Drawing:
    """Draws a bar for each language, with its name, in two columns, and a mark at BLEU of the untranslated source.

    Args:
        bleu, copying: score of each language, in the order in which they are drawn; the second may be empty.
        sentences: number of sentences of each language; may be empty.
    """
    half = -(-len(bleu) // 2)
    longest = max([1.0, *bleu.values(), *copying.values()])
    title = "BLEU by language, from the most to the least training data"
    drawing = Drawing(2 * COLUMN + 10, 40 + ROW * half + 24, title)
    drawing.text(8, 14, title, size=14, bold=True)
    for number, (code, score) in enumerate(bleu.items()):
        column, row = divmod(number, half)
        left, y = 10 + COLUMN * column, 40 + ROW * row
        name = f"{name_of(code)[:18]} {code}" + (f" ({sentences[code]})" if code in sentences else "")
        drawing.text(left + 178, y, name, "end", 11)
        drawing.bars([(left + 184, y - 5, max(0.5, BAR * score / longest), 10)], "blue")
        drawing.text(left + 188 + BAR * score / longest, y, f"{score:.1f}", size=10)
        if code in copying:
            x = left + 184 + BAR * copying[code] / longest
            drawing.line([(x, y - 7), (x, y + 7)], "orange", 2)
    entries = [("BLEU (in brackets: sentences)", "blue"), *([("copying the source", "orange")] * bool(copying))]
    drawing.legend(entries, drawing.height - 14)
    return drawing
