"""The server extension: pages get news of their server's kernels without polling, control only those, and cause no activity."""

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from fractional_gpu.core.forecasts.habits import Share
from fractional_gpu.protocol.messages import EvictRequest
from fractional_gpu_kernel.server.app import _MOST_ACTIONS
from tests.labextension.conftest import Page, State, page_of
from tests.support.share_days import keep_days
from tests.support.stories import fill
from tests.support.victims import kill_all
from tests.support.world import DEADLINE_S, Notebook, Server, World, until

STATE = "jupyter-fractional-gpu/state?no_track_activity=1"


def act(server: Server, kernel_id: str, action: str, body: dict[str, Any] | None = None) -> State:
    reply: State = server.request("POST", f"jupyter-fractional-gpu/kernels/{kernel_id}/{action}", body or {})
    return reply


def refusal(server: Server, kernel_id: str, action: str, body: dict[str, Any] | None = None) -> tuple[int, State]:
    with pytest.raises(urllib.error.HTTPError) as refused:
        act(server, kernel_id, action, body)
    with refused.value as reply:
        return reply.code, json.loads(reply.read())


def advice(server: Server, kernel_id: str) -> State:
    reply: State = server.request("GET", f"jupyter-fractional-gpu/kernels/{kernel_id}/advice?no_track_activity=1")
    return reply


def test_without_a_broker_it_says_so_and_starts_none(world: World, server: Server) -> None:
    assert server.request("GET", STATE) == {"broker": False, "simulated": False, "kernels": [], "devices": []}
    assert world.broker_pid() is None


def test_a_page_hears_what_becomes_of_a_kernel_and_why_it_lost_its_memory_or_gpu_or_is_gone(
    world: World, server: Server, page: Page
) -> None:
    (name,) = world.install(250)
    notebook = server.start(name)
    kernel = page.until_kernel(notebook.kernel_id, "unarmed")
    assert (kernel["fraction_milli"], kernel["reserve_mib"], kernel["simulated"]) == (250, 256, True)
    notebook.must(fill(1, 24))
    page.until_kernel(notebook.kernel_id, "resident")
    assert act(server, notebook.kernel_id, "suspend")["state"] == "suspended"
    assert page.until_kernel(notebook.kernel_id, "suspended")["saved_mib"] >= 24
    assert act(server, notebook.kernel_id, "resume")["state"] == "resident"
    state = page.until(lambda state: [one["state"] for one in state["kernels"]] == ["resident"])
    assert [device["memory_mib"] for device in state["devices"]] == [1024]
    assert server.request("GET", STATE)["kernels"][0]["kernel_id"] == notebook.kernel_id
    what_makes_no_sense_or_is_not_signed_in_is_refused(server, notebook.kernel_id)
    a_broker_that_dies_is_gone_and_comes_back(world, server, page, notebook)
    a_kernel_that_was_evicted_or_is_restarted_without_a_gpu_or_not_at_all_says_why(world, page, notebook)


def a_broker_that_dies_is_gone_and_comes_back(world: World, server: Server, page: Page, notebook: Notebook) -> None:
    world.kill_broker()
    assert page.until(lambda state: not state["broker"])["kernels"] == []
    status, said = refusal(server, notebook.kernel_id, "suspend")
    assert (status, said["reason"]) == (409, "no-lease")
    world.start_broker()
    page.until_kernel(notebook.kernel_id, "resident")


def test_two_servers_show_and_steer_and_advise_on_their_own_kernels_only(
    world: World, server: Server, page: Page
) -> None:
    keep_days(world.ledger, "Python 3 · 1/4 GPU (simulated)", Share(250, 256), 60)
    quarter, half, most = world.install(250, 500, 750)
    mine = server.start(quarter)
    page.until_kernel(mine.kernel_id, "unarmed")
    with (
        Server(world, "--ServerApp.kernel_manager_class=fractional_gpu.KeepingKernelManager") as other,
        page_of(other) as other_page,
    ):
        theirs = other.start(half)
        other_page.until_kernel(theirs.kernel_id, "unarmed")
        for asked, kernel in ((server, mine), (other, theirs)):
            assert [one["kernel_id"] for one in asked.request("GET", STATE)["kernels"]] == [kernel.kernel_id]
        status, said = refusal(server, theirs.kernel_id, "suspend")
        assert (status, said["reason"]) == (404, "unknown-kernel")
        assert advice(server, mine.kernel_id)["sentence"].startswith(
            "1/8 GPU (128 MiB) would suffice: at most 60 MiB of"
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            advice(other, mine.kernel_id)
        with refused.value as reply:
            assert (reply.code, json.loads(reply.read())["reason"]) == (404, "unknown-kernel")
        watching_is_no_activity_and_makes_no_kernel_busy(world, server, page, mine, theirs)
        actions_that_wait_keep_no_other_one_from_its_answer_nor_a_server_that_keeps_its_kernels_from_its_end(
            world, other, other_page, theirs, other.start(most)
        )
    mine.shut_down()
    page.until(lambda state: state["broker"] and state["kernels"] == [])


@contextmanager
def waiting_resumes(world: World, server: Server, waiting: Notebook, count: int) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(count):
            address = urlsplit(server.url)
            pages_own = stack.enter_context(closing(HTTPConnection(str(address.hostname), address.port)))
            route = f"{address.path}jupyter-fractional-gpu/kernels/{waiting.kernel_id}/resume"
            pages_own.request("POST", route, b"{}", {"Authorization": f"token {server.token}"})
        until(lambda: world.lease(waiting.kernel_id).position, "it waits")
        yield


def actions_that_wait_keep_no_other_one_from_its_answer_nor_a_server_that_keeps_its_kernels_from_its_end(
    world: World, server: Server, page: Page, pinned: Notebook, waiting: Notebook
) -> None:
    """Needs two kernels that do not fit together, of which the first is on the GPU."""
    page.until(lambda state: len(state["kernels"]) == 2)
    act(server, pinned.kernel_id, "pin", {"minutes": 30})
    with waiting_resumes(world, server, waiting, _MOST_ACTIONS - 1):
        assert act(server, pinned.kernel_id, "expect", {"sign": "typing"}) == {}
    until(lambda: world.lease(waiting.kernel_id).position is None, "the tickets are withdrawn with their pages")
    with waiting_resumes(world, server, waiting, 1):
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(DEADLINE_S)
    kill_all([pid for kernel in (pinned, waiting) if (pid := world.lease(kernel.kernel_id).pid) is not None])


def last_activity(server: Server, kernel_id: str) -> tuple[str, str, str]:
    kernel = server.request("GET", f"api/kernels/{kernel_id}?no_track_activity=1")
    status = server.request("GET", "api/status?no_track_activity=1")
    return status["last_activity"], kernel["last_activity"], kernel["execution_state"]


def watching_is_no_activity_and_makes_no_kernel_busy(
    world: World, server: Server, page: Page, watched: Notebook, noise: Notebook
) -> None:
    watched.must("1 + 1")
    page.until_kernel(watched.kernel_id, "resident")
    until(lambda: not world.lease(watched.kernel_id).busy, "the broker is certain that the kernel is idle")
    for _ in range(4):  # the kernel answers the broker's earlier commands before the last of these
        watched.must("1 + 1")
    last_activity(server, watched.kernel_id)  # the server has noted it all when it answers the next request
    before = last_activity(server, watched.kernel_id)
    noise.must(fill(1, 24))  # what happens on the device is news to the page
    page.until(lambda state: state["devices"][0]["reserved_mib"] >= 768)
    assert server.request("GET", STATE)["broker"]
    sign = f"jupyter-fractional-gpu/kernels/{watched.kernel_id}/expect?no_track_activity=1"
    assert server.request("POST", sign, {"sign": "typing"}) == {}
    assert world.lease(watched.kernel_id).lease.expected_by == "typing"
    assert last_activity(server, watched.kernel_id) == before


def a_kernel_that_was_evicted_or_is_restarted_without_a_gpu_or_not_at_all_says_why(
    world: World, page: Page, notebook: Notebook
) -> None:
    with world.client() as client:
        lease_id = world.lease(notebook.kernel_id).lease_id
        client.evict(lease_id, EvictRequest(confirm=True, why="the class needs it"))
    sentence = noticed(page, notebook)
    assert sentence.startswith("An administrator (")
    assert "to free the GPU; the reason given: the class needs it. Its variables are lost" in sentence
    assert world.lease(notebook.kernel_id).lease_id != lease_id

    world.kill_broker()
    Path(world.socket).with_name("broker.json").write_text("not what it was")
    notebook.restart()
    assert noticed(page, notebook).startswith("This kernel was started without a GPU: ")
    Path(world.socket).with_name("broker.json").unlink()

    world.notebooks.rename(world.folder / "moved")  # where it is to start
    with pytest.raises(urllib.error.HTTPError) as failed:
        notebook.restart()
    failed.value.close()
    assert noticed(page, notebook).startswith("The kernel could not be restarted: ")


def noticed(page: Page, notebook: Notebook) -> str:
    notice = page.notice()
    assert notice["kernel_id"] == notebook.kernel_id
    sentence: str = notice["sentence"]
    return sentence


def what_makes_no_sense_or_is_not_signed_in_is_refused(server: Server, kernel_id: str) -> None:
    for action, body, sentence in (
        ("explode", {}, "there is no action named 'explode'; choose one of: expect, pin, suspend, resume, unpin"),
        ("suspend", {"now": True}, "suspend does not accept 'now'; it accepts: nothing"),
        ("pin", {"minutes": 0}, "minutes is '0'; expected 1 to 10080"),
        ("expect", {"sign": "typing", "code": "1"}, "expect does not accept 'code'; it accepts: sign"),
        ("pin", {}, "minutes is 'None'; expected 1 to 10080"),
    ):
        assert refusal(server, kernel_id, action, body) == (400, {"message": sentence, "reason": "bad-request"})
    an_action_needs_a_sign_in_and_a_page_of_this_server(server, kernel_id)


def an_action_needs_a_sign_in_and_a_page_of_this_server(server: Server, kernel_id: str) -> None:
    address = f"{server.url}jupyter-fractional-gpu/kernels/{kernel_id}/suspend"
    bare = urllib.request.Request(address, data=b"{}", method="POST")  # noqa: S310 - loopback
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(bare)  # noqa: S310
    refused.value.close()
    assert refused.value.code == 403
    # Signed in by cookie, as browsers are, but without the token that only a page of this server can read: another site's form.
    read = urllib.request.Request(f"{server.url}api/status?token={server.token}")  # noqa: S310
    with urllib.request.urlopen(read) as reply:  # noqa: S310
        cookies = "; ".join(cookie.split(";")[0] for cookie in reply.headers.get_all("Set-Cookie", []))
    assert "username" in cookies
    forged = urllib.request.Request(address, data=b"{}", method="POST", headers={"Cookie": cookies})  # noqa: S310
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(forged)  # noqa: S310
    refused.value.close()
    assert refused.value.code == 403
