"""Any bytes, and everything that the fuzzer once found, to every decoder."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS, seeds

pytestmark = pytest.mark.promise("decoders")

CORPUS = Path(__file__).parent / "corpus"
SCALARS = st.none() | st.booleans() | st.integers() | st.integers(-(2**70), 2**70) | st.floats() | st.text()
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=8
)


def found() -> Iterator[tuple[str, bytes]]:
    """What is kept of the fuzzer's finds, by target."""
    for path in sorted(CORPUS.glob("*/*")):
        yield path.parent.name, path.read_bytes()


@pytest.mark.parametrize(("target", "data"), [*seeds(), *found()])
def test_what_was_found_once_is_decoded_or_refused(target: str, data: bytes) -> None:
    TARGETS[target](data)


def bent(seed: bytes) -> st.SearchStrategy[bytes]:
    """The seed with a piece of it replaced."""

    def bend(start: int, length: int, piece: bytes) -> bytes:
        return seed[:start] + piece + seed[start + length :]

    pieces = st.binary(max_size=8) | JSON.map(lambda value: json.dumps(value).encode())
    return st.builds(bend, st.integers(0, len(seed)), st.integers(0, 20), pieces)


@pytest.mark.parametrize("target", TARGETS)
def test_any_bytes_are_decoded_or_refused(target: str) -> None:
    some = [st.binary(max_size=300), JSON.map(lambda value: b"\x00" + json.dumps(value).encode())]
    some += [
        JSON.map(lambda value: json.dumps(value).encode()),
        *(bent(seed) for name, seed in seeds() if name == target),
    ]

    @given(st.one_of(some))
    def check(data: bytes) -> None:
        TARGETS[target](data)

    check()
