"""A server's page of metrics, in Prometheus's text format."""

from collections.abc import Callable
from itertools import chain

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


def lines_of(page: str, is_wanted: Callable[[str], bool]) -> str:
    """The wanted lines. A page without any is returned whole, so that the parser refuses what is no page of metrics.

    The parser needs 25 ms of a core for a whole page of vLLM's, and a page is read twice a second.
    """
    return "".join(f"{line}\n" for line in page.split("\n") if is_wanted(line)) or page


def samples_of(page: str, is_wanted: Callable[[str], bool]) -> list[Sample]:
    """The samples of the wanted lines, each with its name, labels and value. Raises ValueError if they are no metrics."""
    families = text_string_to_metric_families(lines_of(page, is_wanted))
    return list(chain.from_iterable(family.samples for family in families))


def sums_of(page: str, names: tuple[str, ...]) -> dict[str, float]:
    """The values of the samples with these names, each summed over its labels. What the page has not is left out."""
    totals: dict[str, float] = {}
    for sample in samples_of(page, lambda line: line.startswith(names)):
        if sample.name in names:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals
