"""The mixin over a bare spawner and a live broker: a seat is taken, kept, given back, and never leaked."""

# ruff: noqa: ASYNC240 -- nobody waits for this loop

import asyncio
import json
import logging
import pwd
import stat
from collections.abc import Iterator
from contextlib import aclosing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jupyterhub.spawner import Spawner
from tornado import web

from fractional_gpu.broker.seats.seats import Seats
from fractional_gpu.client.seat import SEAT_FILE_VARIABLE, SeatClient, read_seat
from fractional_gpu.protocol.errors import (
    BrokerUnavailableError,
    ForbiddenError,
    FractionalGPUError,
    InternalBrokerError,
    TooManyRequestsError,
)
from fractional_gpu.protocol.seats import SeatProgress, SeatRequest
from fractional_gpu_hub.mixin import FractionalGPUMixin
from tests.broker.live import LiveBroker, live_broker


class Bare(Spawner):  # type: ignore[misc] # untyped
    running = False
    broken = False

    async def start(self) -> tuple[str, int]:
        if self.broken:
            raise RuntimeError("the server does not start")
        self.running = True
        return "127.0.0.1", 1

    async def stop(self, now: bool = False) -> None:
        del now
        self.running = False
        self.clear_state()  # as JupyterHub's own spawners do

    async def poll(self) -> int | None:
        return None if self.running else 0

    def get_env(self) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": "0"}


class Mixed(FractionalGPUMixin, Bare):
    """As a site would write it."""


class Foreign(Mixed):
    def gpu_user_ids(self) -> tuple[int, int]:
        nobody = pwd.getpwnam("nobody")
        return nobody.pw_uid, nobody.pw_gid


@pytest.fixture(scope="module")
def _live() -> Iterator[LiveBroker]:
    with live_broker(seats_required=True, pools={"default": {"wait_bound": "100%", "oversubscription": 1}}) as live:
        yield live


@pytest.fixture
def live(_live: LiveBroker) -> Iterator[LiveBroker]:
    yield _live
    for seat in seats(_live):
        with SeatClient(_live.socket) as client:
            client.release_seat(seat)


def seats(live: LiveBroker) -> list[str]:
    with SeatClient(live.socket) as client:
        return [seat.seat_id for seat in client.seats().seats]


def spawner(live: LiveBroker, kind: type[Mixed] = Mixed, name: str = "ada", **traits: Any) -> Mixed:  # noqa: ANN401
    made = kind(gpu_socket=live.socket, gpu_broker_patience=0.0, **traits)
    made.user = SimpleNamespace(name=name, groups=[SimpleNamespace(name="students")], id=7)
    made.orm_spawner = SimpleNamespace(state=None, user_options=None, name="", server=None)
    return made


async def hub_starts(one: Mixed, **options: Any) -> None:  # noqa: ANN401
    one.user_options = options
    one.clear_state()
    if hasattr(one, "_run_apply_user_options"):  # new in JupyterHub 5.3
        await one._run_apply_user_options(options)
    await one.start()


def hub_saves(one: Mixed) -> None:
    one.orm_spawner.state = one.get_state()


async def hub_stops(one: Mixed) -> None:
    await one.stop()
    await one.run_post_stop_hook()
    one.clear_state()
    hub_saves(one)


async def test_a_server_gets_its_seat_as_a_private_file_and_gives_it_back(live: LiveBroker) -> None:
    one = spawner(live)
    await hub_starts(one, pool="default", fraction="1/4")
    (seat_id,) = seats(live)
    environment = one.get_env()
    assert environment["CUDA_VISIBLE_DEVICES"] == "", "no GPU but through a lease"
    assert environment["JUPYTER_GPU_SOCKET"] == live.socket
    assert environment["JUPYTER_GPU_DEFAULT_FRACTION"] == "250m"
    file = Path(environment[SEAT_FILE_VARIABLE])
    seat = read_seat(str(file))
    assert (seat.seat_id, seat.pool, seat.fraction_milli, seat.memory_mib) == (seat_id, "default", 250, 256)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert seat.token not in json.dumps(environment)
    assert seat.token not in json.dumps(one.get_state())
    assert "--ServerApp.kernel_spec_manager_class=fractional_gpu.SeatKernelSpecManager" in one.get_args()
    await hub_stops(one)
    assert seats(live) == []
    assert not file.exists()
    assert SEAT_FILE_VARIABLE not in one.get_env()


async def test_the_file_belongs_to_the_servers_user_who_alone_may_draw_on_the_seat(live: LiveBroker) -> None:
    one = spawner(live, Foreign)
    await hub_starts(one, pool="default", fraction="1/4")
    file = Path(one.get_env()[SEAT_FILE_VARIABLE])
    assert file.stat().st_uid == pwd.getpwnam("nobody").pw_uid
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o711, "others may go through, and not look around"
    with SeatClient(live.socket) as client:
        assert client.seats().seats[0].uid == pwd.getpwnam("nobody").pw_uid
    await hub_stops(one)


async def test_a_user_whose_name_cannot_be_shown_is_told_what_to_do(live: LiveBroker) -> None:
    one = spawner(live, name="ada\u202e")
    with pytest.raises(web.HTTPError) as caught:
        await hub_starts(one, pool="default", fraction="1/4")
    said = caught.value.jupyterhub_message  # type: ignore[attr-defined]
    assert "U+202E (right-to-left override)" in said
    assert "ask your administrator to rename the user at the hub" in said
    assert said.isprintable()
    await hub_starts(one, fraction="none")
    await hub_stops(one)


async def test_an_existing_folder_of_seat_files_keeps_its_mode(live: LiveBroker, tmp_path: Path) -> None:
    folder = tmp_path / "seats"
    folder.mkdir()
    folder.chmod(0o755)
    one = spawner(live, Foreign, gpu_seat_dir=str(folder))
    await hub_starts(one, pool="default", fraction="1/4")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    await hub_stops(one)
    folder.chmod(0o750)
    with pytest.raises(web.HTTPError, match=r"mode 0750.*chmod o\+x.*gpu_seat_dir"):
        await hub_starts(one, pool="default", fraction="1/4")
    await one.run_post_stop_hook()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750
    assert seats(live) == []


async def test_a_hub_that_dies_before_it_saved_the_seat_leaves_nothing(live: LiveBroker) -> None:
    one = spawner(live)
    one.start_timeout = one.http_timeout = 0
    await hub_starts(one, pool="default", fraction="1/4")
    with SeatClient(live.socket) as client:
        (seat,) = client.seats().seats
    assert seat.expires_ms is not None
    assert not seat.confirmed
    await one.poll()
    with SeatClient(live.socket) as client:
        assert not client.seats().seats[0].confirmed, "it is not in the hub's database yet"
    # The next hub does not know the seat; its user's next server replaces it at once, and without one it expires.
    other = spawner(live)
    await hub_starts(other, pool="default", fraction="1/2")
    assert seats(live) != [seat.seat_id]
    assert len(seats(live)) == 1
    await hub_stops(other)


async def test_a_seat_is_confirmed_once_the_hub_has_saved_it(live: LiveBroker) -> None:
    one = spawner(live)
    await hub_starts(one, pool="default", fraction="1/4")
    hub_saves(one)
    assert await one.poll() is None
    with SeatClient(live.socket) as client:
        assert client.seats().seats[0].confirmed
    await hub_stops(one)


async def test_the_next_hub_takes_over_confirms_and_gives_back(live: LiveBroker) -> None:
    first = spawner(live)
    await hub_starts(first, pool="default", fraction="1/4")
    hub_saves(first)  # and dies before it polls
    second = spawner(live)
    second.orm_spawner.state = first.orm_spawner.state
    second.load_state(json.loads(json.dumps(first.orm_spawner.state)))
    second.running = True
    assert second.get_env()[SEAT_FILE_VARIABLE] == first.get_env()[SEAT_FILE_VARIABLE]
    await second.poll()
    with SeatClient(live.socket) as client:
        assert client.seats().seats[0].confirmed
    await hub_stops(second)
    assert seats(live) == []


@pytest.mark.parametrize(
    "error",
    [
        BrokerUnavailableError("nobody serves"),
        ForbiddenError("this hub is no administrator any more"),
        TooManyRequestsError("too much at once"),
        InternalBrokerError("its log says why"),
    ],
    ids=lambda error: error.code,
)
async def test_a_seat_that_cannot_be_confirmed_now_ends_no_server_and_is_confirmed_later(
    live: LiveBroker, monkeypatch: pytest.MonkeyPatch, error: FractionalGPUError
) -> None:
    def fail(*_: object) -> None:
        raise error

    one = spawner(live)
    await hub_starts(one, pool="default", fraction="1/4")
    hub_saves(one)
    with monkeypatch.context() as context:
        context.setattr(SeatClient, "confirm_seat", fail)
        assert await one.poll() is None
    with SeatClient(live.socket) as client:
        assert not client.seats().seats[0].confirmed
        assert await one.poll() is None
        assert client.seats().seats[0].confirmed
    await hub_stops(one)


async def test_a_server_that_does_not_start_gives_its_seat_back(live: LiveBroker) -> None:
    one = spawner(live)
    one.broken = True
    with pytest.raises(RuntimeError, match="does not start"):
        await hub_starts(one, pool="default", fraction="1/4")
    await one.run_post_stop_hook()
    assert seats(live) == []
    assert SEAT_FILE_VARIABLE not in one.get_env()


async def test_the_configured_hook_runs_too(live: LiveBroker) -> None:
    ran: list[str] = []

    async def hook(of: Any) -> None:  # noqa: ANN401 - a spawner
        ran.append(of.user.name)

    one = spawner(live)
    one.post_stop_hook = hook
    await hub_starts(one, pool="default", fraction="1/4")
    await hub_stops(one)
    assert ran == ["ada"]


async def test_two_hubs_with_a_user_of_the_same_name_take_nothing_from_each_other(live: LiveBroker) -> None:
    first, second = spawner(live), spawner(live)
    for one, port in ((first, 8081), (second, 9081)):
        one.hub = SimpleNamespace(api_url=f"http://127.0.0.1:{port}/hub/api")
        await hub_starts(one, pool="default", fraction="1/4")
    files = [one.get_env()[SEAT_FILE_VARIABLE] for one in (first, second)]
    assert [read_seat(file).seat_id for file in files] == seats(live)
    await hub_stops(second)
    assert [read_seat(files[0]).seat_id] == seats(live)
    await hub_stops(first)


async def test_a_limit_that_a_server_at_another_hub_reaches_is_on_the_spawn_page() -> None:
    with live_broker(pools={"default": {"user_limits": {"fraction": "1/4"}, "wait_bound": "100%"}}) as live:
        here, there = spawner(live), spawner(live)
        for one, port in ((here, 8081), (there, 9081)):
            one.hub = SimpleNamespace(api_url=f"http://127.0.0.1:{port}/hub/api")
        await hub_starts(there, pool="default", fraction="1/4")
        for one, is_free in ((here, False), (there, True)):
            (pool,) = (await one.gpu_offers()).pools
            (quarter,) = [offer for offer in pool.fractions if offer.fraction_milli == 250]
            assert (quarter.free, bool(quarter.why_not)) == (is_free, not is_free)


async def test_without_a_gpu_no_seat_is_taken(live: LiveBroker) -> None:
    one = spawner(live)
    await hub_starts(one, fraction="none")
    assert seats(live) == []
    assert one.get_env() == {"CUDA_VISIBLE_DEVICES": "", "JUPYTER_GPU_SOCKET": live.socket}
    await hub_stops(one)


async def test_a_hub_may_insist_on_a_gpu(live: LiveBroker) -> None:
    one = spawner(live, gpu_allow_without=False)
    with pytest.raises(web.HTTPError, match="you chose a server without a GPU, but every server of this hub has a GPU"):
        await hub_starts(one, fraction="none")
    assert "No GPU" not in await one.get_options_form()


async def test_who_asks_for_nothing_gets_the_default(live: LiveBroker) -> None:
    one = spawner(live)
    await hub_starts(one)
    assert one.get_env()["JUPYTER_GPU_DEFAULT_POOL"] == "default"
    assert one.get_env()["JUPYTER_GPU_DEFAULT_FRACTION"] == "250m"
    await hub_stops(one)


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({}, ("shared", 250)),
        ({"pool": "whole"}, ("whole", 1000)),
        ({"fraction": 1}, ("whole", 1000)),
        ({"fraction": "1/8"}, ("shared", 125)),
    ],
)
async def test_what_a_choice_leaves_out_goes_with_the_rest(options: dict[str, Any], chosen: tuple[str, int]) -> None:
    pools = {"shared": {"devices": [0], "fractions": ["1/8", "1/4"]}, "whole": {"devices": [1], "fractions": ["1"]}}
    with live_broker("2x1GiB", seats_required=True, pools=pools, default_pool="shared") as live:
        one = spawner(live)
        await hub_starts(one, **options)
        assert one.gpu_seat is not None
        assert (one.gpu_seat["pool"], one.gpu_seat["fraction_milli"]) == chosen
        await hub_stops(one)


@pytest.mark.parametrize(
    ("options", "said"),
    [({}, "1/8 GPU was requested; you may have 1/2"), ({"fraction": 1}, "1 GPU was requested; you may have 1/2")],
)
async def test_who_reached_a_limit_and_leaves_the_pool_out_is_told_the_limit(
    options: dict[str, Any], said: str
) -> None:
    with live_broker(seats_required=True, pools={"default": {"user_limits": {"fraction": "1/2"}}}) as live:
        first, second = spawner(live), spawner(live)
        second.orm_spawner.name = "second"
        await hub_starts(first, pool="default", fraction="1/2")
        with pytest.raises(web.HTTPError, match=said):
            await hub_starts(second, **options)
        await hub_stops(first)


FORGED: list[tuple[dict[str, Any], str]] = [
    ({"pool": "default", "fraction": 7}, "out of range"),
    ({"pool": "default", "fraction": "1/0"}, "invalid fraction"),
    ({"pool": "default", "fraction": ["1/4"]}, "neither a fraction nor a size"),
    ({"pool": "default", "fraction": True}, "neither a fraction nor a size"),
    ({"pool": "../../etc", "fraction": "1/4"}, "is not a valid pool name"),
    ({"pool": {"$gt": ""}, "fraction": "1/4"}, "is not a valid pool name"),
    ({"pool": "gold", "fraction": "1/4"}, "there is no pool named 'gold'"),
    ({"pool": "default", "fraction": "1/3"}, "offers 1/8, 1/4, 1/2, 3/4, 1"),
    ({"pool": "default", "fraction": "1/4", "memory": "9TiB"}, "the largest device of pool 'default' can give 1 GiB"),
    ({"pool": "default", "fraction": "1/4", "memory": "-1"}, "is not a valid size"),
    ({"fraction": "none", "pool": "default"}, "leave those out"),
]


@pytest.mark.parametrize(("options", "sentence"), FORGED)
async def test_forged_options_are_refused_with_a_sentence(
    live: LiveBroker, options: dict[str, Any], sentence: str
) -> None:
    one = spawner(live)
    with pytest.raises(web.HTTPError) as caught:
        await hub_starts(one, **options)
    assert 400 <= caught.value.status_code < 600
    assert sentence.lower() in str(caught.value).lower()
    assert caught.value.reason
    assert "<strong>" in caught.value.jupyterhub_html_message  # type: ignore[attr-defined]
    await one.run_post_stop_hook()
    assert seats(live) == []
    assert not one.running


async def test_options_that_are_not_ours_are_left_to_others(live: LiveBroker) -> None:
    one = spawner(live)
    query = one.options_from_query({"arg": ["value"], "owner": ["root"], "gpu": ["default/250"]})
    assert query == {"arg": ["value"], "owner": ["root"], "pool": "default", "fraction": "250m"}
    await hub_starts(one, **query)
    assert one.user_options == query
    assert one.gpu_seat is not None
    with SeatClient(live.socket) as client:
        assert [seat.owner for seat in client.seats().seats] == ["ada"], "what a user sends names nobody else"
    await hub_stops(one)


async def test_the_seat_is_one_key_of_the_state_that_the_spawner_below_saves(live: LiveBroker) -> None:
    class Numbered(Mixed):
        def get_state(self) -> dict[str, Any]:
            return {**super().get_state(), "pid": 7}

    one = spawner(live, Numbered)
    await hub_starts(one, fraction="none")
    assert one.get_state() == {"pid": 7}, "a server without a GPU looks as it would without this project"
    await hub_stops(one)
    await hub_starts(one, fraction="1/4")
    assert set(one.get_state()) == {"pid", "gpu_seat"}
    await hub_stops(one)


async def test_options_of_the_spawner_below_are_its_own(live: LiveBroker) -> None:
    one = spawner(live, options_form="<input name='image'>")
    await hub_starts(one, pool="default", fraction="1/4", image="science")
    form = await one.get_options_form()
    assert form.startswith("<input name='image'>")
    assert one.run_options_from_form({"image": ["science"], "gpu": ["default/250"], "_xsrf": ["x"]}) == {
        "image": ["science"],
        "pool": "default",
        "fraction": "250m",
    }
    await hub_stops(one)


async def test_what_a_user_is_called_cannot_break_the_refusals_page(live: LiveBroker) -> None:
    one = spawner(live)
    with pytest.raises(web.HTTPError) as caught:
        await hub_starts(one, pool="default", fraction="<script>alert(1)</script>")
    assert "<script>" not in caught.value.jupyterhub_html_message  # type: ignore[attr-defined]


async def test_a_full_pool_says_how_long_and_what_is_free_and_every_viewer_hears_all_of_it(
    live: LiveBroker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with SeatClient(live.socket) as client:
        holder = list(client.take_seat(SeatRequest(owner="bob", pool="default", fraction_milli=750)))[-1]
    one = spawner(live)
    one._spawn_pending = True
    start = asyncio.create_task(hub_starts(one, pool="default", fraction="1/2"))
    early = await viewer(one, "number 1 in the queue")
    late = await viewer(one, "number 1 in the queue")
    assert [event["message"] for event in early] == [event["message"] for event in late]
    assert early[0]["message"] == "Asking for 1/2 GPU of pool default"
    assert "has promised 768 MiB of the 1 GiB that it may promise" in early[1]["message"]
    assert (
        "to wait. Available now: 1/8 GPU of pool default, 1/4 GPU of pool default, a server without a GPU."
        in early[1]["message"]
    )

    def more() -> SeatProgress:
        with SeatClient(live.socket) as client:
            return list(client.take_seat(SeatRequest(owner="eve", pool="default", fraction_milli=125)))[-1]

    other = await asyncio.to_thread(more)
    assert "Available now: " in (await viewer(one, "has promised 896 MiB"))[-1]["message"], "it stays in sight"

    def let_go() -> None:
        with SeatClient(live.socket) as client:
            for seat in (holder, other):
                client.release_seat(seat.seat_id)

    waits = [line for line in caplog.messages if "is waiting for 1/2 GPU of pool default" in line]
    assert len(waits) == 1, "the hub's log has one line for the wait, however often its reason changes"
    assert "has promised 768 MiB of the 1 GiB" in waits[0]
    assert "number 1 in the queue" in waits[0]
    await asyncio.to_thread(let_go)
    await start
    assert any("waited" in line and "for 1/2 GPU of pool default" in line for line in caplog.messages)
    messages = [event["message"] async for event in one.progress()]
    assert messages[-3:] == ["Your server has 1/2 GPU of pool default", "Starting the server", "Spawning server..."]
    await hub_stops(one)


async def viewer(one: Mixed, until: str) -> list[dict[str, Any]]:
    seen = []
    async with asyncio.timeout(30), aclosing(one.progress()) as events:
        async for event in events:
            seen.append(event)
            if until in event["message"]:
                return seen
    raise AssertionError(f"no event says {until!r}: {seen}")


async def test_a_start_that_is_given_up_leaves_the_queue(live: LiveBroker) -> None:
    with SeatClient(live.socket) as client:
        list(client.take_seat(SeatRequest(owner="bob", pool="default", fraction_milli=1000)))
    one = spawner(live)
    start = asyncio.create_task(hub_starts(one, pool="default", fraction="1/2"))
    await viewer(one, "number 1 in the queue")
    start.cancel()
    with suppress(asyncio.CancelledError):
        await start
    await one.run_post_stop_hook()
    queue: Seats = live.service.seats

    async def left() -> None:
        while queue.listing().waiting:
            await queue._changed.wait()

    await asyncio.to_thread(live.on_loop, left)
    assert len(seats(live)) == 1


async def test_without_a_broker_the_page_says_so_and_a_start_is_refused(live: LiveBroker, tmp_path: Path) -> None:
    one = spawner(live, gpu_seat_dir=str(tmp_path))
    one.gpu_socket = str(tmp_path / "nobody.sock")
    form = await one.get_options_form()
    assert 'role="alert"' in form
    assert "the GPU broker is not responding" in form
    assert 'id="gpu-none" value="none" required' in form
    with pytest.raises(web.HTTPError) as caught:
        await hub_starts(one, pool="default", fraction="1/4")
    assert (caught.value.status_code, caught.value.reason) == (503, "broker")


async def test_a_seat_dir_that_cannot_be_written_is_named(live: LiveBroker, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    one = spawner(live, gpu_seat_dir=str(tmp_path / "file" / "seats"))
    with pytest.raises(web.HTTPError, match=r"(?i)the hub could not write"):
        await hub_starts(one, pool="default", fraction="1/4")
    await one.run_post_stop_hook()
    assert seats(live) == []
