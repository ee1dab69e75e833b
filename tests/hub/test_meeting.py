"""Groups, limits, priorities, opening hours and full pools as a user meets them on the page and by the API; and forged requests."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import jupyterhub
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.hub.pages import Visitor
from tests.support.hub import HubServer, HubWorld, Refused, new_hub
from tests.support.world import DEADLINE_S, Notebook, new_world, until

CLOSED = time.strftime("%a", time.localtime(time.time() + 3 * 86_400))
POOLS: dict[str, Any] = {
    "default": {
        "devices": [0],
        "price": "0.80 EUR",
        "price_hours": {"Mon-Fri 08:00-18:00": 1.20},
        "user_limits": {"fraction": "1/2"},
        "wait_bound": "100%",
        "groups": {"students": {"weight": 200, "priority": 10}},
    },
    "staff": {"devices": [1], "groups": {"staff": {}}},
    "closed": {"devices": [2], "hours": f"{CLOSED} 08:00-08:30"},
    "full": {"devices": [3], "oversubscription": 1, "when_full": "refuse", "fractions": ["1"]},
}
GROUPS = {"staff": ["grace"], "students": ["ada", "bob"]}
_SHOWN_WITH_200 = (
    jupyterhub.version_info[0] < 6
)  # JupyterHub 5 does not count its page with the form and the error as a failure


@pytest.fixture(scope="module")
def hub() -> Iterator[HubWorld]:
    with new_world("4x256MiB") as world:
        for pool in ("default", "staff"):
            world.install(125, 250, 500, 1000, pool=pool)
        with new_hub(world, {"pools": POOLS}, groups=GROUPS) as hub:
            until(lambda: world.broker_pid() is not None, "the hub's broker serves")
            yield hub


@pytest.fixture(scope="module")
def ada(hub: HubWorld) -> HubServer:
    return hub.server("ada", pool="default", fraction="1/4")


REFUSALS: list[tuple[str, dict[str, Any], int, str]] = [
    ("ada", {"pool": "staff", "fraction": "1/4"}, 403, "Pool 'staff' is for members of staff, but you are in students"),
    (
        "eve",
        {"pool": "staff", "fraction": "1/4"},
        403,
        "Pool 'staff' is for members of staff, but you are not in any group",
    ),
    (
        "bob",
        {"pool": "closed", "fraction": "1/4"},
        503,
        f"Pool 'closed' is currently closed; it is open {CLOSED} 08:00-08:30",
    ),
    (
        "bob",
        {"pool": "default", "fraction": "3/4"},
        403,
        "you may have 1/2 GPU in this pool; choose a smaller fraction",
    ),
    (
        "bob",
        {"pool": "default", "fraction": "1/3"},
        400,
        "pool 'default' offers 1/8, 1/4, 1/2, 3/4, 1; choose one of these",
    ),
    ("bob", {"pool": "default", "fraction": {"$ne": 1}}, 400, "neither a fraction nor a size"),
    ("bob", {"pool": "default/../staff", "fraction": "1/4"}, 400, "is not a valid pool name"),
]


@pytest.mark.parametrize(("user", "options", "status", "sentence"), REFUSALS)
def test_the_api_refuses_with_the_reason(
    hub: HubWorld, user: str, options: dict[str, Any], status: int, sentence: str
) -> None:
    with pytest.raises(Refused) as caught:
        hub.spawn(user, **options)
    assert caught.value.status == status
    assert sentence.lower() in caught.value.message.lower()
    assert not [seat for seat in seats(hub) if seat.owner == user and seat.pool != "default"]
    assert sentence[1:].split(",", maxsplit=1)[0] in (hub.world.folder / "hub.err").read_text(), "it is in the log"


@pytest.mark.parametrize(
    ("user", "chosen", "sentence"),
    [
        (
            "bob",
            "staff/250",
            "Your server was not started. Pool 'staff' is for members of staff, but you are in students",
        ),
        pytest.param("bob", "closed/250", f"next opens on {CLOSED} 08:00", id="closed"),  # at midnight, too
        ("bob", "default/750", "you may have 1/2 GPU in this pool"),
        ("bob", "default/333", "offers 1/8, 1/4, 1/2, 3/4, 1"),
        ("bob", "<b>x</b>/1", "is not a valid pool name"),
        ("bob", "default/²", "is not one of the choices; reload the page and choose again"),
    ],
)
def test_the_page_refuses_with_the_same_reason_and_offers_the_choice_again(
    hub: HubWorld, user: str, chosen: str, sentence: str
) -> None:
    page = Visitor(hub, user).refused(gpu=chosen)
    assert 400 <= page.status < 600 or _SHOWN_WITH_200
    assert sentence in page.error
    assert "<b>x</b>" not in page.html


def test_the_page_shows_what_the_user_may_choose_and_a_sensible_default(hub: HubWorld) -> None:
    page = Visitor(hub, "bob").get("hub/spawn")
    assert page.choices["default/250"], "the default is chosen already"
    assert set(page.choices) == {f"default/{milli}" for milli in (125, 250, 500)} | {"full/1000", "none"}
    assert "Pool staff" not in page.text, "pools of others are not shown"
    assert "Not available: pool 'closed' is currently closed" in page.text
    assert "1/4 GPU, 64 MiB, 0.20 to 0.30 EUR per hour" in page.text
    assert (
        "A whole GPU costs 0.80 EUR per hour, 1.20 Mon-Fri 08:00-18:00; the time during which a kernel has memory"
        in page.text
    )
    assert page.text.count("A whole GPU costs") == 1, "pools without a price have no terms"
    assert "you may have 1/2 GPU in this pool" in page.text, "why some cannot be chosen"
    assert "(free now)" in page.text
    assert "These GPUs are simulated" in page.text
    assert "Pool staff" in Visitor(hub, "grace").get("hub/spawn").text


def test_the_page_can_be_used_without_seeing_it(hub: HubWorld) -> None:
    """Every choice has a label and a description bound to it, and every group has a name."""
    html = Visitor(hub, "bob").get("hub/spawn").html
    form = html[html.index('<fieldset class="gpu-choice">') : html.rindex("</fieldset>")]
    assert form.count("<fieldset") == form.count("<legend>")
    for value in ("default-250", "full-1000", "none"):
        assert f'id="gpu-{value}"' in form
        assert f'<label class="form-check-label" for="gpu-{value}">' in form
    assert 'aria-describedby="gpu-default-250-hint"' in form
    assert '<small id="gpu-default-250-hint">' in form


def test_a_full_pool_refuses_on_the_page_and_by_the_api_and_says_what_is_free(hub: HubWorld) -> None:
    hub.spawn("holder", pool="full", fraction="1")
    with pytest.raises(Refused) as caught:
        hub.spawn("bob", pool="full", fraction="1")
    assert caught.value.status == 503
    assert "has promised 256 MiB of the 256 MiB that it may promise" in caught.value.message
    visitor = Visitor(hub, "bob")
    page = visitor.refused(gpu="full/1000")
    assert page.status == (200 if _SHOWN_WITH_200 else 503)
    assert "has promised 256 MiB" in page.error
    assert "Available now: 1/8 GPU of pool default, 1/4 GPU of pool default" in page.error
    assert "full now" in visitor.get("hub/spawn").text
    hub.await_server("holder")
    hub.stop("holder")
    until(lambda: not [seat for seat in seats(hub) if seat.pool == "full"], "a server that ended gives its seat back")


def test_limits_count_all_of_a_users_servers(hub: HubWorld, ada: HubServer) -> None:
    del ada
    with pytest.raises(Refused) as caught:
        hub.spawn("ada", "second", pool="default", fraction="1/2")
    assert caught.value.status == 403
    assert "you may have 1/2 GPU in this pool, and your other servers have 1/4 GPU" in caught.value.message


def test_priority_and_weight_come_from_the_group(hub: HubWorld, ada: HubServer) -> None:
    del ada
    (seat,) = [seat for seat in seats(hub) if seat.owner == "ada"]
    assert (seat.group, seat.priority, seat.weight) == ("students", 10, 200)


def test_the_launcher_shows_what_the_seat_suffices_for(ada: HubServer) -> None:
    assert ada.launcher() == ["fractional-gpu-default-125", "fractional-gpu-default-250"]


# -- what users forge -------------------------------------------------------------------------------------------------------


def _own_kernelspec(hub: HubWorld, name: str, **config: Any) -> str:  # noqa: ANN401 - whatever a user writes
    folder = hub.world.kernels_dir / name
    content = json.loads((hub.world.kernels_dir / "fractional-gpu-default-250" / "kernel.json").read_text())
    content["metadata"]["kernel_provisioner"]["config"] = config
    folder.mkdir()
    (folder / "kernel.json").write_text(json.dumps(content))
    return name


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            {"pool": "default", "fraction": "1"},
            "a kernel with 1 GPU was requested, but this server has 1/4 GPU with 64 MiB",
        ),
        ({"pool": "default", "fraction": "1/4", "memory": "200MiB"}, "a kernel with 200 MiB was requested"),
        ({"pool": "staff", "fraction": "1/4"}, "a kernel of pool 'staff' was requested, but this server has"),
        (
            {"pool": "default", "fraction": "1/8", "priority": 900},
            "priority 900 was requested, but this server's maximum is 10",
        ),
    ],
)
def test_a_users_own_kernelspec_gets_no_more_than_the_seat(
    hub: HubWorld, ada: HubServer, config: dict[str, Any], sentence: str
) -> None:
    name = _own_kernelspec(hub, f"mine-{abs(hash(sentence))}", **config)
    wish = {"kernel": {"name": name}, "name": "forged", "path": f"{name}.ipynb", "type": "notebook"}
    with pytest.raises(urllib.error.HTTPError) as caught:
        ada.request("POST", "api/sessions", wish)
    with caught.value as error:
        assert sentence in json.loads(error.read())["message"], "the person in front of JupyterLab reads it"
    assert hub.world.status().leases == []
    assert "got no kernel" in hub.logs()["hub.err"] + hub.world.logs().get("broker.log", "")


def test_variables_changed_in_the_server_give_nothing(hub: HubWorld, ada: HubServer) -> None:
    """A user changes the variables in a kernel of the server: without the seat, with a forged one, and with another fraction."""
    notebook = ada.start("python3")
    try:
        assert notebook.must("import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))").text == "''\n"
        refused = ask_from(notebook, fraction=250, without_seat=True)
        assert "only servers that the hub started with a GPU can use one" in refused
        assert "has 1/4 GPU" in ask_from(notebook, fraction=1000)
        forged = (
            "{'seat_id': '0' * 24, 'token': 'x' * 43, 'pool': 'default', 'fraction_milli': 1000, 'memory_mib': 256}"
        )
        assert "the token does not match it" in ask_from(notebook, fraction=1000, forged=forged)
        # The file claims more than the seat has, which has no effect.
        assert "has 1/4 GPU" in ask_from(notebook, fraction=1000, more=True)
        assert hub.world.status().leases == []
        assert ask_from(notebook, fraction=250) == "granted\n", "and what is allowed works"
    finally:
        notebook.shut_down()
    assert hub.world.status().leases == []


def ask_from(
    notebook: Notebook, *, fraction: int, without_seat: bool = False, forged: str = "", more: bool = False
) -> str:
    code = f"""
import json, os, tempfile
from fractional_gpu.jupyter.kernel_lease import take_lease
from fractional_gpu.protocol.errors import FractionalGPUError
from fractional_gpu.protocol.messages import LeaseRequest
kept = os.environ["JUPYTER_GPU_SEAT_FILE"]
with tempfile.NamedTemporaryFile("w") as file:
    forged = {forged or "None"}
    if {more}:
        forged = json.load(open(kept)) | {{"fraction_milli": 1000, "memory_mib": 256, "pool": "default"}}
    if forged is not None:
        json.dump(forged, file); file.flush()
        os.environ["JUPYTER_GPU_SEAT_FILE"] = file.name
    if {without_seat}:
        del os.environ["JUPYTER_GPU_SEAT_FILE"]
    try:
        lease = take_lease(LeaseRequest(fraction_milli={fraction}, pool="default"), timeout_s=30)
        lease.release()
        print("granted")
    except FractionalGPUError as error:
        print(error)
    finally:
        os.environ["JUPYTER_GPU_SEAT_FILE"] = kept
"""
    return notebook.must(code).text


def test_another_users_token_opens_neither_server_nor_hub(hub: HubWorld, ada: HubServer) -> None:
    hub.add_user("mallory")
    token = hub.api("POST", "users/mallory/tokens", {"note": "test"})["token"]
    for path in ("api/kernels", "api/kernelspecs"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            _with_token(ada, token).request("GET", path)
        with caught.value as error:
            assert error.code == 403
    for method, path, body in (
        ("POST", "users/ada/servers/x", {"pool": "default", "fraction": "1/4"}),
        ("DELETE", "users/ada/server", None),
        ("GET", "users/ada/server/progress", None),
    ):
        with pytest.raises(Refused) as refused:
            hub.api(method, path, body, token=token)
        assert refused.value.status in (403, 404)
    assert [seat.owner for seat in seats(hub) if seat.server == "x"] == []


def _with_token(server: HubServer, token: str) -> HubServer:
    stranger = object.__new__(HubServer)
    stranger.url, stranger.token = server.url, token
    return stranger


def seats(hub: HubWorld) -> list[Any]:
    with hub.seats() as client:
        return client.seats().seats


def test_the_hubs_metrics_have_the_spawns_and_the_waits_for_seats(hub: HubWorld, ada: HubServer) -> None:
    assert ada is not None  # a server with a GPU was started
    with pytest.raises(Refused):
        hub.server("eve", pool="staff", fraction="1/4")
    request = urllib.request.Request(f"{hub.url}hub/metrics", headers={"Authorization": f"token {hub.token}"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as reply:  # noqa: S310 - loopback
        families = list(text_string_to_metric_families(reply.read().decode()))
    found = {(one.name, *sorted(one.labels.items())): one.value for family in families for one in family.samples}
    assert found["jupyter_gpu_hub_spawns_total", ("outcome", "gpu"), ("reason", "")] >= 1
    assert found["jupyter_gpu_hub_spawns_total", ("outcome", "refused"), ("reason", "pool-group")] >= 1
    assert found["jupyter_gpu_hub_seat_wait_seconds_count", ("pool", "default")] >= 1
