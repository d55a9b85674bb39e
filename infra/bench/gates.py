"""How often gates are wrong: this project's and its peers', on made-up releases.

    .venv/bin/python -m infra.bench.gates [--runs N] [--seed S]

The verdicts of this project's gates come from the product's own functions. The last line is one JSON object with this
project's figures, as fractions. The default number of runs takes four minutes on 16 cores, and half an hour on two. The same
seed gives the same numbers.
"""

import argparse
import json
from collections.abc import Iterator
from statistics import fmean

from infra.bench import accuracy, other_worlds, speed, tries
from infra.bench.accuracy import GateName
from infra.bench.simulation import (
    FLIPS,
    MARGIN,
    MARGIN_OF_SPEED,
    NOISES,
    PAST,
    PAST_OF_SPEED,
    RELEASE,
    Rates,
    Setting,
    settings,
    simulate,
)

RUNS, SEED = 1000, 1
LOSS, SLOWDOWN, JUST_PAST = 0.015, 0.05, (MARGIN + PAST, MARGIN_OF_SPEED + PAST_OF_SPEED)
RateRow = tuple[str, float, Rates]
Results = dict[Setting, dict[GateName, Rates]]

PAIRED, IN_TURNS = f"paired, {RELEASE}", f"in turns, {RELEASE}"
MEANING = """\
A loss is of the expected score over just these questions, base 91 %. Noise is the rate at which two repetitions of one build
differ, or a repeat's standard deviation. Asked is in answers to each question, or in repeats; allowed is what margin and noise
call for. Peers are told the baseline's true score and have one run; this project measures its baseline, from 3 to 10 times.
Four gates with noise share 5 % of false alarms in a release; alone, one has them all."""
COLUMNS = {
    "n": 6,
    "noise %": 9,
    "margin %": 9,
    "lost %": 8,
    "pass %": 8,
    "fail %": 8,
    "undec. %": 9,
    "asked": 7,
    "allowed %": 10,
}


def table(results: Results) -> Iterator[str]:
    """One line for each setting and gate."""
    yield f"{'gate':40}" + "".join(f"{name:>{width}}" for name, width in COLUMNS.items())
    for setting, gates in results.items():
        if isinstance(setting, other_worlds.OfAnswers | other_worlds.OfLoads):
            continue
        yield ""
        for gate, rates in gates.items():
            yield f"{gate:40}{_of(setting)}{_numbers(setting, rates)}"


def _of(setting: Setting) -> str:
    if isinstance(setting, speed.Setting):
        return f"{'':6}{100 * setting.noise:9.1f}{100 * setting.margin:9.2f}{100 * setting.slowdown:8.2f}"
    return f"{setting.questions:6}{100 * setting.flips:9.1f}{100 * setting.margin:9.2f}{100 * setting.lost:8.2f}"


def _numbers(setting: Setting, rates: Rates) -> str:
    asked = rates.asked if isinstance(setting, speed.Setting) else rates.asked / setting.questions
    verdicts = f"{100 * rates.passed:8.1f}{100 * rates.failed:8.1f}{100 * rates.undecided:9.1f}"
    return f"{verdicts}{asked:7.2f}{100 * rates.share:10.0f}"


def table_of_worlds(results: Results) -> Iterator[str]:
    """One line for each world and loss."""
    columns = ("lost %", "pass %", "fail %", "undec. %", "asked", "starts", "baseline")
    yield f"{'world':40}" + "".join(f"{name:>9}" for name in columns)
    for setting, gates in results.items():
        if not isinstance(setting, other_worlds.OfAnswers | other_worlds.OfLoads):
            continue
        of_answers = isinstance(setting, other_worlds.OfAnswers)
        lost, questions = (setting.lost, setting.questions) if of_answers else (setting.slowdown, 1)
        for gate, rates in gates.items():
            shares = "".join(f"{100 * rate:9.1f}" for rate in (rates.passed, rates.failed, rates.undecided))
            price = f"{rates.asked / questions:9.2f}{rates.starts:9.2f}{rates.baseline_repetitions:9.2f}"
            yield f"{gate:40}{100 * lost:9.2f}{shares}{price}"


def savings(results: Results) -> Iterator[str]:
    """The answers that early looks save for releases without a loss, by the rate of flips."""
    yield "Answers where nothing is lost, as a share of those that no early look needs for the same wrong passes and undecided:"
    yield f"{'flips %':>8}{'of the measured rates':>24}{'of 5 % and 5 %':>18}{'of those allowed':>18}"
    for flips in FLIPS:
        same = _whole(results, flips, 0.0)
        measured, nominal = _fixed(results, flips, measured=True), _fixed(results, flips, measured=False)
        yield f"{100 * flips:8.0f}{same.asked / 1319 / measured:24.2f}{same.asked / 1319 / nominal:18.2f}{same.share:18.2f}"


def _fixed(results: Results, flips: float, *, measured: bool) -> float:
    same, past = _whole(results, flips, 0.0), _whole(results, flips, MARGIN + PAST)
    rates = (past.passed, same.undecided + same.failed) if measured else (0.05, 0.05)
    setting = accuracy.Setting(1319, flips, 0.0, MARGIN)
    # A rate of 0 needs infinitely many answers, so the least rate is half a release.
    passed, undecided = (max(rate, 0.5 / RUNS) for rate in rates)
    return accuracy.fixed_answers(setting, passed, undecided, round(same.baseline_repetitions))


def _whole(results: Results, flips: float, lost: float) -> Rates:
    return results[accuracy.Setting(1319, flips, lost, MARGIN)][PAIRED]


def figures(results: Results) -> dict[str, float]:
    """This project's figures, in a release with four gates: the worst over all noises, unless the name has a noise."""
    same = [_whole(results, flips, 0.0) for flips in FLIPS]
    past = [_whole(results, flips, MARGIN + PAST) for flips in FLIPS]
    return {
        "false_alarm": max(rates.failed for rates in same),
        "undecided": max(rates.undecided for rates in same),
        "detected_at_1_5_points": _whole(results, 0.03, 0.015).failed,
        "approved_past_margin": max(rates.passed for rates in past),
        "approved_past_margin_in_10_tries": _tried(results, MARGIN + PAST).passed,
        "approved_no_loss_in_10_tries": _tried(results, 0.0).passed,
        "questions_share": fmean(
            rates.asked / 1319 / _fixed(results, flips, measured=True) for flips, rates in zip(FLIPS, same, strict=True)
        ),
        "slowdown_detected": _slower(results, 0.01, 0.05),
        "slowdown_false_alarm": max(_slower(results, noise, 0.0) for noise in NOISES),
        **_over_worlds(results),
    }


def _over_worlds(results: Results) -> dict[str, float]:
    """The worst over all worlds, each measured as it calls for."""
    losses, loads = _of_worlds(results)
    return {
        "worlds": len({name for name, _, _ in (*losses, *loads)}),
        "pass_past_margin": max(rates.passed for _, lost, rates in (*losses, *loads) if lost in JUST_PAST),
        "fail_no_loss": max(rates.failed for _, lost, rates in (*losses, *loads) if lost == 0),
        "caught_1_5_points": min(rates.failed for _, lost, rates in losses if lost == LOSS),
        "undecided_no_loss": max(rates.undecided for _, lost, rates in (*losses, *loads) if lost == 0),
        "caught_5_percent_slowdown": min(rates.failed for _, lost, rates in loads if lost == SLOWDOWN),
    }


def _of_worlds(results: Results) -> tuple[list[RateRow], list[RateRow]]:
    """The rows of answers and those of loads: the usual worlds at each noise, tries, and the others as they are measured now.

    A load of 3 % noise is in none of them: 10 repeats do not decide it, and no world asks for more than a load of 1 % can show.
    """
    losses, loads = [], []
    for setting, gates in results.items():
        match setting:
            case accuracy.Setting(questions=1319, margin=margin) if margin == MARGIN:
                losses.append(("usual answers", setting.lost, gates[PAIRED]))
            case tries.Setting():
                losses.append(("tries", setting.lost, gates[tries.COUNTED]))
            case speed.Setting() if setting.noise <= 0.01:
                loads.append(("usual loads", setting.slowdown, gates[IN_TURNS]))
            case other_worlds.OfAnswers() if setting.is_usual:
                losses.append((f"answers: {setting.world}", setting.lost, *gates.values()))
            case other_worlds.OfLoads(before=False):
                loads.append((f"loads: {setting.world}", setting.slowdown, *gates.values()))
    return losses, loads


def _tried(results: Results, lost: float) -> Rates:
    """The most passes where something is lost, and the fewest where nothing is."""
    rates = [
        gates[tries.COUNTED]
        for setting, gates in results.items()
        if isinstance(setting, tries.Setting) and setting.lost == lost
    ]
    return (max if lost else min)(rates, key=lambda rate: rate.passed)


def _slower(results: Results, noise: float, slowdown: float) -> float:
    return results[speed.Setting(noise, slowdown, MARGIN_OF_SPEED)][IN_TURNS].failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=RUNS, help="releases of each line")
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args()
    results = simulate(settings(), args.runs, args.seed)
    for line in table(results):
        print(line)
    print(f"\n{MEANING}\n")
    for line in savings(results):
        print(line)
    print()
    for line in table_of_worlds(results):
        print(line)
    print(json.dumps(figures(results)))


if __name__ == "__main__":
    main()
