"""The refusals of a release in words: which of its cells stand out, and which may be chance."""

from vllm_qualify.judge.chance import CellChance, Refusals
from vllm_qualify.report.words import share


def lines(found: Refusals) -> list[str]:
    """Some lines for people; none where nothing was refused, or where there is only one cell to judge by."""
    refused = len(found.standing_out) + len(found.perhaps_chance)
    if found.judged < 2 or not refused:
        return []
    told = [
        f"{refused} of {found.judged} judged cells {'is' if refused == 1 else 'are'} refused; of as many that meet all their"
        f" bounds, chance alone refuses at most {found.by_chance:.3g} on average"
    ]
    told += [f"  stands out: {_cell(cell)}" for cell in found.standing_out]
    told += [f"  may be chance, and is worth another try: {_cell(cell)}" for cell in found.perhaps_chance]
    if found.standing_out:
        told.append(f"  of those that stand out, at most {share(found.rate)} are chance, on average")
    return told


def _cell(found: CellChance) -> str:
    return f"{found.cell} (p {found.p_value:.2g})"
