"""Each promise of docs/promises.md has tests, and each marker names a promise."""

from tests.promises import faults, marked, promised


def test_each_promise_has_a_test_and_each_marker_a_promise() -> None:
    assert len(promised()) > 100
    assert faults(promised(), marked()) == []


def test_a_promise_without_a_test_and_an_unknown_marker_are_named() -> None:
    promises = {"kept": ("Kept.", ""), "broken": ("Broken.", "")}
    tests = {"kept": ["tests/a.py"], "misspelt": ["tests/b.py::test_it"]}
    assert faults(promises, tests) == [
        "No test keeps the promise broken.",
        "tests/b.py::test_it names the promise misspelt, which docs/promises.md does not have.",
    ]
