"""Which user's figures the account routes return. The tests put rows into a running broker's ledger."""

import getpass
import time
from collections.abc import Iterator

import pytest

from fractional_gpu.core.metering.usage import Party, Usage, UsageKey, UsageRow
from fractional_gpu.protocol.accounts import Cost, UsageReport
from fractional_gpu.protocol.codec import decode_reply
from tests.broker.live import LiveBroker, live_broker

ME = getpass.getuser()


def _row(owner: str, milli: int, *, seated: bool, hours_ago: int = 0) -> UsageRow:
    hour_s = int(time.time()) // 3600 * 3600 - 3600 * hours_ago
    key = UsageKey(hour_s, f"lease-of-{owner}-{seated}", "GPU-0", "EUR")
    party = Party("default", owner=owner, group="lab", label="a.ipynb", seated=seated)
    return UsageRow(key, party, Usage(charge_milli=milli, reserved_ms=1))


@pytest.fixture(scope="module")
def live() -> Iterator[LiveBroker]:
    with live_broker(pools={"default": {"price": "1 EUR"}}, usage_visible="all") as live:
        rows = [_row(ME, 100, seated=False), _row(ME, 20, seated=True), _row("ada", 3, seated=True)]
        rows.append(_row(ME, 4000, seated=False, hours_ago=24 * 40))

        async def write() -> None:
            live.disk.add_metered(rows, "{}")

        live.on_loop(write)
        yield live


def _amount(report: UsageReport) -> int:
    return sum(entry.usage.charge_milli for entry in report.entries)


def test_a_kernels_month_is_its_own_users_however_much_users_may_see(live: LiveBroker) -> None:
    """A group's or the whole pool's sums are not one user's bill."""
    lease = live.lease()
    answer = live.call("GET", f"/v1/leases/{lease.lease_id}/cost", token=lease.token)
    cost = decode_reply(answer.body, Cost)
    assert [entry.usage.charge_milli for entry in cost.month] == [100]
    assert (cost.lease, cost.currency) == ([], "EUR")
    assert cost.terms.startswith("A whole GPU costs 1.00 EUR per hour;")


def test_users_of_the_hub_and_of_the_machine_are_told_apart(live: LiveBroker) -> None:
    def report(query: str) -> UsageReport:
        return decode_reply(live.call("GET", f"/v1/usage?since_s={int(time.time()) - 7200}&{query}").body, UsageReport)

    assert _amount(report(f"user={ME}")) == 120
    assert _amount(report(f"user={ME}&seated=1")) == 20
    assert _amount(report(f"user={ME}&seated=0")) == 100
    assert _amount(report("seated=1")) == 23
    assert _amount(report("user=")) == 0, "an empty name is also a name: the pool itself"
    assert _amount(report("user=%20ada")) == 0, "names are not trimmed"
    assert report("").visible == "all"


@pytest.mark.parametrize("text", ["2", "yes", "1 ", "01"])
def test_a_kind_of_user_that_there_is_not_is_refused(live: LiveBroker, text: str) -> None:
    error = live.call("GET", f"/v1/usage?seated={text.replace(' ', '%20')}").error
    assert error["reason"] == "bad-query"
