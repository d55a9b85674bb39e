"""What a sample cannot show, in words: a change that hits so few of what is asked that none of these may be in the sample."""

import math


def share_unseen(number: int, alpha: float) -> float:
    """The smallest share that so many draws hit at least once with the chance 1 - `alpha`.

    It is the bound of Clopper & Pearson 1934 (Biometrika 26) for a share of which nothing was seen.
    """
    return float(-math.expm1(math.log(alpha) / number))


def rare_changes(number: int, alpha: float, of: str) -> str:
    """The change that an interval over so many texts or questions does not have, and how many more would show."""
    fewer, half = (f"{100 * share_unseen(each, alpha):.2g} %" for each in (number, 2 * number))
    return (
        f"a change that hits fewer than {fewer} of the {of}, which {number:,} cannot show: {2 * number:,} would show one that"
        f" hits {half}"
    )
