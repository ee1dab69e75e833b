"""Units are parsed strictly, and printed values can be parsed again."""

import string
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.core.units import (
    format_duration,
    format_forecast,
    format_fraction,
    format_gpus,
    format_memory,
    format_rough,
    host_capacity,
    parse_duration_ms,
    parse_fraction_milli,
    parse_memory_mib,
    plural,
)


def repr_type(value: object) -> str:
    """Name a case, as the numbers are too large to print."""
    return type(value).__name__


ODD = [
    "", " ", "abc", "1e99999999", "1e9", "1E-3", "inf", "nan", "-1", "+1", "1/0", "0/0", "1//2", "1/2/3", "1/2m", "m", "1_0", "0x1", "1,5",
    ".", "/", "\N{ARABIC-INDIC DIGIT FOUR}", "1/\N{ARABIC-INDIC DIGIT FOUR}", "9" * 65, "0." + "1" * 80, "250 m", "1\0",
]  # fmt: skip


@pytest.mark.parametrize("text", ODD)
def test_what_is_not_a_fraction_is_refused_at_once_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match=r"invalid fraction .*; expected more than 0 and at most 1") as caught:
        parse_fraction_milli(text)
    assert repr(text[:64]) in str(caught.value)


@pytest.mark.parametrize("value", [0, 1.5, 2, "0", "1.5", "3/2", "1001m", "0m", "0/5", 10**18])
def test_a_fraction_out_of_range_is_refused_with_what_is_allowed(value: str | float) -> None:
    with pytest.raises(
        ValueError, match=r'is out of range; expected more than 0 and at most 1, such as 0.25, "1/4" or "250m"'
    ):
        parse_fraction_milli(value)


@pytest.mark.parametrize(
    "value", [True, None, [1], float("nan"), float("inf"), 1e300, 10**5000, -(10**5000)], ids=repr_type
)
def test_what_is_no_text_or_number_of_ordinary_length_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"invalid fraction .*; expected"):
        parse_fraction_milli(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "milli"),
    [
        (0.25, 250),
        ("1/4", 250),
        ("250m", 250),
        (" .5 ", 500),
        ("1.", 1000),
        (1, 1000),
        ("1/3", 333),
        ("0.0001", 1),
        ("0.5m", 1),
    ],
)
def test_a_fraction_is_read_in_thousandths(value: str | float, milli: int) -> None:
    assert parse_fraction_milli(value) == milli


@pytest.mark.parametrize(
    "text", ["1", "1/2", "1/3", "2/3", "1/4", "4/5", "1/6", "7/8", "1/10", "1/12", "1/16", "15/16", "0.23", "0.09"]
)
def test_a_fraction_is_printed_as_people_wrote_it_though_thousandths_are_kept(text: str) -> None:
    assert format_fraction(parse_fraction_milli(text)) == text


def test_counts_are_printed_with_their_noun_and_sums_of_shares_as_gpus() -> None:
    assert [plural(count, "kernel") for count in (0, 1, 2, 1200)] == [
        "0 kernels",
        "1 kernel",
        "2 kernels",
        "1,200 kernels",
    ]
    assert [format_gpus(milli) for milli in (0, 62, 250, 1000, 1500)] == [
        "0 GPU",
        "1/16 GPU",
        "1/4 GPU",
        "1 GPU",
        "1.5 GPUs",
    ]


@given(st.integers(1, 1000))
def test_a_fraction_that_is_printed_reads_back_the_same(milli: int) -> None:
    assert parse_fraction_milli(format_fraction(milli)) == milli
    assert parse_fraction_milli(f"{milli}m") == milli
    assert parse_fraction_milli(milli / 1000) == milli


@given(st.text(st.sampled_from(string.digits + "./meE-+_ x"), max_size=80) | st.text(max_size=80))
def test_any_text_is_a_fraction_in_range_or_a_value_error(text: str) -> None:
    try:
        milli = parse_fraction_milli(text)
    except ValueError as error:
        assert "expected more than 0 and at most 1" in str(error)  # noqa: PT017 - only if it is one
    else:
        assert 1 <= milli <= 1000


@given(st.text(max_size=80) | st.integers() | st.floats() | st.booleans() | st.none())
def test_any_size_or_duration_is_a_whole_number_or_a_value_error(value: object) -> None:
    for parse in (parse_memory_mib, parse_duration_ms):
        try:
            number = parse(value)  # type: ignore[arg-type]
        except ValueError as error:
            assert "expected a" in str(error)  # noqa: PT017 - only if it is one
        else:
            assert number >= 0


@pytest.mark.parametrize(
    "value", [10**5000, -(10**5000), "9" * 65, "1e9999999GiB", "GiB", "0", "1KiB", -1, 1.5, True, None], ids=repr_type
)
def test_what_is_not_a_size_is_refused_at_once_with_what_is_allowed(value: object) -> None:
    with pytest.raises(ValueError, match=r"memory .* is .*; expected a positive size such as 512MiB, 20GiB or 20GB"):
        parse_memory_mib(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "mib"), [("3", 3), ("2GiB", 2048), ("2 tib", 2 << 20), ("1T", 1 << 20), ("1.5GB", 1430), (7, 7)]
)
def test_memory_is_read_in_mib(text: str | int, mib: int) -> None:
    assert parse_memory_mib(text) == mib


def test_host_memory_is_described_as_a_number_of_kernels() -> None:
    assert host_capacity(64 * 1024, 80 * 1024, 250) == "room for 3 that filled 1/4 of a GPU, 20 GiB each"


@pytest.mark.parametrize("value", [10**5000, "1e99s", "5 minutes", "-1s", True, None, 1.5], ids=repr_type)
def test_what_is_not_a_duration_is_refused_at_once_with_what_is_allowed(value: object) -> None:
    with pytest.raises(ValueError, match=r"invalid duration .*; expected a duration such as 30s, 5m, 2h or 0"):
        parse_duration_ms(value)  # type: ignore[arg-type]


@given(st.integers(1, 2**40))
def test_a_size_that_is_printed_reads_back_within_its_last_digit(mib: int) -> None:
    read = parse_memory_mib(format_memory(mib))
    assert abs(read - mib) <= (
        0 if mib < 1024 else 1024 * Fraction(1, 20) + 1
    )  # half a digit, and a MiB lost to rounding when it is parsed


@given(st.integers(0, 10**9))
def test_a_duration_is_printed_without_a_fraction_of_a_millisecond(ms: int) -> None:
    printed = format_duration(ms)
    assert printed.endswith((" ms", " s", " min", " h"))
    if ms < 60_000:
        assert abs(parse_duration_ms(printed.replace(" ", "")) - ms) <= 50


# -- forecasts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (-5, "under 1 s"),
        (999, "under 1 s"),
        (4_400, "4 s"),
        (43_000, "45 s"),
        (58_000, "1 min"),
        (150_000, "2 min"),
        (3_540_000, "59 min"),
        (3_600_000, "1 h"),
        (4_400_000, "1 h 10 min"),
    ],
)
def test_durations_are_said_as_people_do(ms: int, text: str) -> None:
    assert format_rough(ms) == text


@given(st.integers(0, 10**9))
def test_a_countdown_changes_its_words_rarely(ms: int) -> None:
    words = {format_rough(left) for left in range(ms, max(0, ms - 20_000), -500)}
    assert len(words) <= 13


@pytest.mark.parametrize(
    ("span_ms", "text"),
    [
        ((8_000, 5_000, 14_000), "about 8 s (5 to 15)"),
        ((40_000, 10_000, 120_000), "about 40 s (10 s to 2 min)"),
        ((60_000, 40_000, 300_000), "about 1 min (40 s to 5 min)"),
        ((5_400_000, 3_600_000, 7_200_000), "about 1 h 30 min (1 h to 2 h)"),
        ((8_000, 200, 14_000), "about 8 s (up to 15)"),
        ((300, 100, 5_000), "under 1 s (up to 5 s)"),
        ((300, 100, 500), "under 1 s"),
        ((40_000, 40_000, 40_100), "about 40 s"),
        ((40_000, None, None), "about 40 s"),
    ],
)
def test_a_forecast_is_said_with_its_interval(span_ms: tuple[int, int | None, int | None], text: str) -> None:
    assert format_forecast(*span_ms) == text
    about, bracket, interval = text.partition(" (")
    assert format_forecast(*span_ms, more=True) == f"{about} more{bracket}{interval}"


@given(st.lists(st.integers(-10_000, 10**9), min_size=3, max_size=3))
def test_any_forecast_is_said_in_one_line_with_at_most_three_durations(values: list[int]) -> None:
    low, expected, high = sorted(values)
    said = format_forecast(expected, low, high)
    assert format_rough(expected) in said
    assert ("(" in said) == (format_rough(low) != format_rough(high))
