"""`jupyter gpu pool`: what is refused before the broker is asked to change anything."""

from collections.abc import Iterator

import pytest

from fractional_gpu.commands.main import main
from tests.broker.live import LiveBroker, live_broker


@pytest.fixture(scope="module")
def live() -> Iterator[LiveBroker]:
    with live_broker() as live:
        yield live


@pytest.mark.parametrize("pool", ["gold", "", "gold/../default"])
def test_a_pool_that_is_not_there_is_named(live: LiveBroker, pool: str, capsys: pytest.CaptureFixture[str]) -> None:
    for change in ([], ["idle_after=2m"]):
        assert main(["pool", pool, *change, "--socket", live.socket]) == 2
        assert f"there is no pool named {pool!r}; `jupyter gpu pool` lists the pools" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["fractions=['1/4', '1/2']", "user_limits={leases: 2}"])
def test_a_list_that_is_no_json_is_told_from_text(
    live: LiveBroker, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pool", "default", change, "--socket", live.socket]) == 2
    assert "the value is not valid JSON" in capsys.readouterr().err
    assert main(["pool", "default", 'fractions=["1/4", "1/2"]', "--socket", live.socket]) == 0
