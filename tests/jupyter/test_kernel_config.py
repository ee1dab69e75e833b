"""A kernelspec's config is checked to the last key; what is wrong is named in one sentence with what is allowed."""

import pytest

from fractional_gpu.jupyter.kernel_command import check_pool_name, parse_kernel_config
from fractional_gpu.protocol.errors import BadRequestError
from fractional_gpu.protocol.messages import LeaseRequest


def parse(stanza: dict[str, object]) -> LeaseRequest:
    return parse_kernel_config(stanza, default_pool="default", default_fraction="1/4")[0]


def test_nothing_said_takes_the_defaults() -> None:
    assert parse({}) == LeaseRequest(pool="default", fraction_milli=250, memory_mib=None, priority=0)


@pytest.mark.parametrize("fraction", [0.25, "1/4", "250m", "0.25"])
def test_a_fraction_can_be_spelt_in_three_ways(fraction: object) -> None:
    assert parse({"fraction": fraction}).fraction_milli == 250


def test_everything_said_is_taken() -> None:
    stanza: dict[str, object] = {"pool": "teaching", "fraction": 1, "memory": "20GiB", "devices": 1, "priority": -3}
    assert parse(stanza) == LeaseRequest(pool="teaching", fraction_milli=1000, memory_mib=20480, priority=-3)


def test_several_devices_are_whole_ones_without_saying_so() -> None:
    assert parse({"devices": 2}) == LeaseRequest(pool="default", fraction_milli=1000, devices=2)
    assert parse({"devices": 8, "fraction": 1}).devices == 8


def test_what_is_guaranteed_is_less_than_what_may_be_used() -> None:
    config = parse({"fraction": "1/4", "memory": "40GiB", "request": "10GiB"})
    assert (config.memory_mib, config.request_mib) == (40_960, 10_240)


@pytest.mark.parametrize(
    ("stanza", "says"),
    [
        (
            {"fractoin": 0.5},
            ["'fractoin'", "did you mean 'fraction'?", "pool, fraction, memory, request, devices, priority"],
        ),
        ({"zzz": 1}, ["'zzz'", "expected one of: pool, fraction"]),
        ({"fraction": 0}, ["fraction '0'", "more than 0 and at most 1"]),
        ({"fraction": 1.5}, ["fraction '1.5'", "at most 1"]),
        ({"fraction": "a lot"}, ["'a lot'", "1/4"]),
        ({"fraction": True}, ["True", "1/4"]),
        ({"fraction": [0.5]}, ["[0.5]", "1/4"]),
        ({"fraction": None}, ["None", "1/4"]),
        ({"memory": "much"}, ["memory 'much'", "20GiB"]),
        ({"memory": 0}, ["memory 0", "20GiB"]),
        ({"memory": 1.5}, ["memory 1.5 is not", "20GiB"]),
        ({"devices": 0}, ["devices is 0", "from 1 to 8"]),
        ({"devices": 9}, ["devices is 9", "from 1 to 8"]),
        ({"devices": "1"}, ["devices is '1'", "from 1 to 8"]),
        ({"devices": True}, ["devices is True", "from 1 to 8"]),
        ({"devices": 2, "fraction": "1/2"}, ["fraction '1/2' cannot be combined with 2 devices", "leave fraction out"]),
        ({"request": "some"}, ["memory 'some'", "20GiB"]),
        ({"priority": "high"}, ["priority is 'high'", "-1000 to 1000"]),
        ({"priority": 1001}, ["priority is 1001", "-1000 to 1000"]),
        ({"priority": True}, ["priority is True", "-1000 to 1000"]),
        ({"pool": ""}, ["pool ''", "starting with a letter or digit"]),
        ({"pool": "../up"}, ["pool '../up'", "letters, digits"]),
        ({"pool": 7}, ["pool 7", "letters, digits"]),
        ({"pool": "x" * 300}, ["xxx...", "up to 63"]),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(stanza: dict[str, object], says: list[str]) -> None:
    with pytest.raises(BadRequestError) as caught:
        parse(stanza)
    message = str(caught.value)
    assert all(part in message for part in says), message
    assert "\n" not in message
    assert len(message) < 400


@pytest.mark.parametrize("name", ["default", "A100", "team-1.large_x", "7"])
def test_pool_names_that_can_be_folders_are_taken(name: str) -> None:
    assert check_pool_name(name) == name


@pytest.mark.parametrize("name", [".hidden", "-x", "a b", "a/b", "ä", "a\n", "a" * 64])
def test_pool_names_that_cannot_be_folders_are_refused(name: str) -> None:
    with pytest.raises(BadRequestError, match="is not a valid pool name"):
        check_pool_name(name)
