"""What the probe reads from a parser, in this process: the parser is of the form that vLLM's has."""

import argparse

from vllm_qualify.drift.probe import accepted_options, unnamed_options


def parser_of(*, is_apart: bool) -> argparse.ArgumentParser:
    """With a flag as vLLM has it: since 0.33 its action keeps the names that switch it off apart, and has two of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    parser.add_argument("--max-num-seqs", type=int, default=8)
    flag = parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=None)
    if is_apart:
        parser._option_string_actions["--disable-prefix-caching"] = flag
        flag.option_strings = ["--enable-prefix-caching"]
        flag.negative_option_strings = ["--no-enable-prefix-caching", "--disable-prefix-caching"]  # type: ignore[attr-defined]  # as vLLM 0.33 does
    return parser


def test_a_flag_that_is_switched_off_by_its_name_is_named() -> None:
    """vLLM 0.33 refused every recipe with a `no-enable-…` option, as one that no key of the recipe names."""
    for is_apart in (False, True):
        parser = parser_of(is_apart=is_apart)
        parsed = parser.parse_args(["--max-num-seqs", "4"])
        parsed.enable_prefix_caching = False
        assert unnamed_options("no-enable-prefix-caching: true\nmax-num-seqs: 4\n", parsed, parser) == [], is_apart
        assert unnamed_options("max-num-seqs: 4\n", parsed, parser) == ["enable-prefix-caching"], is_apart


def test_both_names_that_switch_a_flag_off_are_the_flags() -> None:
    options = accepted_options(parser_of(is_apart=True))
    assert set(options) == {"help", "config", "max-num-seqs", "enable-prefix-caching"}
    assert set(options["enable-prefix-caching"]["negatives"]) == {"no-enable-prefix-caching", "disable-prefix-caching"}
