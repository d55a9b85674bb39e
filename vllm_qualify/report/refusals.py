"""The refusals of a release in words: which of its cells stand out, and which may be chance."""

from vllm_qualify.judge.chance import CellChance, Refusals
from vllm_qualify.report.words import share


def refusal_lines(refusals: Refusals) -> list[str]:
    """Some lines for people; none where nothing was refused, or where there is only one cell to judge by."""
    refused = len(refusals.standing_out) + len(refusals.perhaps_chance)
    if refusals.judged < 2 or not refused:
        return []
    texts = [
        f"{refused} of {refusals.judged} judged cells {'is' if refused == 1 else 'are'} refused; of as many that lost nothing"
        f" and meet all their bounds, chance alone refuses at most {refusals.by_chance:.3g} on average"
    ]
    texts += [f"  stands out: {_cell_words(cell)}" for cell in refusals.standing_out]
    texts += [f"  may be chance, and is worth another try: {_cell_words(cell)}" for cell in refusals.perhaps_chance]
    if refusals.standing_out:
        texts.append(f"  of those that stand out, at most {share(refusals.rate)} are chance, on average")
    return texts


def _cell_words(cell: CellChance) -> str:
    return f"{cell.cell} (p {cell.p_value:.2g})"
