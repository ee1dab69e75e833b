"""The usage and cost routes: what they refuse, and which figures a token gives access to."""

import subprocess
import sys
from urllib.parse import quote, urlencode

import pytest

from fractional_gpu.client.seat import SeatClient
from fractional_gpu.core.metering.usage import Party, Usage, UsageKey, UsageRow
from fractional_gpu.protocol.seats import SeatRequest
from tests.broker.live import BECOME_NOBODY, LiveBroker

pytestmark = pytest.mark.promise("usage-privacy")

HOUR_S = 1_795_000_000


def has(live: LiveBroker, lease: str, owner: str, *, seated: bool = False, charge_milli: int = 5) -> None:
    row = UsageRow(
        UsageKey(HOUR_S, lease, "", "EUR"),
        Party(pool="p", owner=owner, group="", label=f"{lease}.ipynb", seated=seated),
        Usage(charge_milli=charge_milli),
    )

    async def add() -> None:
        await live.broker.writer.submit(lambda: live.disk.add_metered([row], "{}"))

    live.on_loop(add)


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("by=colour", "invalid value for 'by': 'colour'; choose from hour, day, month, user, group, "),
        ("by=user,user", "invalid value for 'by': 'user,user'; choose from "),
        ("by=USER", "invalid value for 'by': 'USER'; choose from "),
        ("since_s=yesterday", "in the query: Expected `int`, got `str` - at `$.since_s`"),
        ("since_s=-1", "Expected `int` >= 0 - at `$.since_s`"),
        ("until_s=1.5", "Expected `int`, got `str`"),
        ("until_s=9999999999999", "Expected `int` <= 999999999999"),
        (f"until_s={quote('١٢')}", "Expected `int`, got `str`"),
        (f"user={'u' * 5000}", "Expected `str` of length <= 200 - at `$.user`"),
        (f"device={'d' * 5000}", "Expected `str` of length <= 200 - at `$.device`"),
    ],
)
def test_a_bad_query_is_refused_with_what_is_allowed(live: LiveBroker, query: str, says: str) -> None:
    answer = live.call("GET", f"/v1/usage?{query}")
    assert answer.status == 400
    assert answer.error["reason"] == "bad-query"
    assert says in answer.error["message"]
    assert len(answer.error["message"]) < 500


def test_an_administrator_gets_the_sums_that_are_asked_for(live: LiveBroker) -> None:
    has(live, "one", "ada", charge_milli=5)
    has(live, "two", "grace", charge_milli=7)
    query = urlencode({"by": "user,pool,month", "since_s": HOUR_S, "until_s": HOUR_S + 1, "pool": "p"})
    body = live.call("GET", f"/v1/usage?{query}").body
    assert (body["by"], body["since_s"], body["until_s"]) == (["user", "pool", "month"], HOUR_S, HOUR_S + 1)
    assert (body["scope"], body["simulated"]) == ("all", True)
    assert {one["of"]["user"]: one["usage"]["charge_milli"] for one in body["entries"]} == {"ada": 5, "grace": 7}
    assert set(body["devices"]) == set(live.broker.devices)
    assert live.call("GET", f"/v1/usage?since_s={HOUR_S + 1}").body["entries"] == []


def test_a_server_with_a_seat_sees_what_its_hub_user_used_and_no_user_of_the_machine(live: LiveBroker) -> None:
    has(live, "hers", "seated-ada", seated=True, charge_milli=11)
    has(live, "other", "seated-ada", charge_milli=13)
    with SeatClient(live.socket) as client:
        *_, seat = client.take_seat(SeatRequest(owner="seated-ada", server="", pool="default", fraction_milli=125))
    program = f"""
import sys
sys.path[:] = {sys.path!r}
from fractional_gpu.client.client import BrokerClient
import fractional_gpu.protocol.accounts, fractional_gpu.protocol.codec, fractional_gpu.client.http, encodings.idna
{BECOME_NOBODY}
with BrokerClient({live.socket!r}, token={seat.token!r}) as client:
    report = client.usage(["notebook"], 0, {2**39}, {{}})
    print(report.scope, [(one.of["notebook"], one.usage.charge_milli) for one in report.entries])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("own [('hers.ipynb', 11)]", "")
