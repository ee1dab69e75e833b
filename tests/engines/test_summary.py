"""The text that a node's agent publishes: `fractional_gpu.protocol.nodes`."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.protocol.nodes import MAX_SUMMARY, NodeSummary, PoolSummary, encode_summary, parse_summary

NUMBERS = st.integers(0, 10**9)
NAMES = st.text(st.characters(exclude_categories=("C", "Z")), max_size=20)
POOLS = st.builds(
    PoolSummary,
    name=NAMES,
    devices=NUMBERS,
    total_milli=NUMBERS,
    held_milli=NUMBERS,
    admissible_milli=NUMBERS,
    waiting=NUMBERS,
    wait_p50_ms=NUMBERS,
    wait_p95_ms=NUMBERS,
    fraction_milli=NUMBERS,
    fractions_milli=st.lists(NUMBERS, max_size=4),
    count=st.sampled_from(["", "jgpu"]),
)
SUMMARIES = st.builds(
    NodeSummary,
    at_s=NUMBERS,
    simulated=st.booleans(),
    memory_left_mib=NUMBERS,
    pools=st.lists(POOLS, max_size=30),
    problem=st.sampled_from(["", "the broker is down; `x` = 'y'"]),
)
WORD = frozenset(string.printable) - frozenset(string.whitespace) - frozenset("='`")


@given(SUMMARIES)
def test_the_text_is_one_short_word_and_says_what_was_written(summary: NodeSummary) -> None:
    text = encode_summary(summary)
    assert len(text) <= MAX_SUMMARY
    assert set(text) <= WORD
    read = parse_summary(text)
    assert len(read.pools) + read.left_out == len(summary.pools)
    assert read.pools == summary.pools[: len(read.pools)]
    assert (read.at_s, read.problem) == (summary.at_s, summary.problem)


@given(st.text(max_size=200) | SUMMARIES.map(encode_summary).map(lambda text: text[:-1]))
def test_any_other_text_is_refused_with_one_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="summary"):
        parse_summary(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"version":2,"at_s":1,"news":[]}', "unknown field `version`; install the same release"),
        ('{"at_s":-60}', "Expected `int` >= 0"),
        ('{"at_s":1,"more":1}', "unknown field `more`"),
        ('{"at_s":1,"problem":"\\u001b[2J"}', "printable"),
        ('{"at_s":1,"pools":[' + "[" * 60 + "]" * 60 + "]}", "does not come from a node agent"),
        (
            '{"at_s":1,"pools":[{"name":"a","devices":1,"total_milli":1,"held_milli":1.5,"admissible_milli":1}]}',
            "got `float`",
        ),
        ('{"at_s":1' + " " * MAX_SUMMARY + "}", "longer than 4096 bytes"),
    ],
)
def test_each_refusal_says_what_is_wrong(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_summary(text)
