"""If a kernel cannot start, its user sees the sentence that says why and what to do."""

import json
import pickle
import urllib.error
from collections.abc import Mapping
from typing import Any

import pytest
from tornado.web import HTTPError

from fractional_gpu.jupyter.kernelspecs import PROVISIONER_NAME
from fractional_gpu.jupyter.provisioner import start_error
from fractional_gpu.protocol.errors import FractionalGPUError, NoRoomError, UnauthorizedError
from tests.support.world import Server, World

pytestmark = pytest.mark.promise("refused-start")


def write_spec(world: World, name: str, **config: object) -> str:
    stanza = {"provisioner_name": PROVISIONER_NAME, "config": config}
    content = {
        "argv": ["python", "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": name,
        "language": "python",
        "metadata": {"kernel_provisioner": stanza},
    }
    folder = world.kernels_dir / name
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps(content))
    return name


def refused(server: Server, method: str, path: str, body: Mapping[str, Any]) -> tuple[int, str]:
    server._refused = True
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.request(method, path, body)
    with caught.value as error:
        return error.code, json.loads(error.read())["message"]


def session(path: str, kernel: str) -> dict[str, object]:
    return {"path": path, "type": "notebook", "name": path, "kernel": {"name": kernel}}


def test_a_server_answers_with_the_sentence_however_a_kernel_is_asked_for(world: World) -> None:
    (good,) = world.install(500)
    wrong = {
        write_spec(world, "misspelt", fracton="1/2"): "unknown key 'fracton'; did you mean 'fraction'?",
        write_spec(world, "poolless", pool="nowhere"): "there is no pool named 'nowhere'; pools: default",
        write_spec(world, "lots", fraction="lots"): "invalid fraction 'lots'",
    }
    with Server(world) as server:
        running = server.request("POST", "api/sessions", session("good.ipynb", good))
        for name, sentence in wrong.items():
            status, message = refused(server, "POST", "api/kernels", {"name": name})
            assert status == 400
            assert sentence in message
            # The session routes have one status for everything, and one of them wraps the sentence in jupyter_server's words.
            status, message = refused(server, "POST", "api/sessions", session(f"{name}.ipynb", name))
            assert status == 500
            assert sentence in message
            status, message = refused(server, "PATCH", f"api/sessions/{running['id']}", {"kernel": {"name": name}})
            assert status == 501
            assert sentence in message.replace("\\", "")
        left = server.request("GET", "api/sessions")
        assert [one["kernel"]["id"] for one in left] == [running["kernel"]["id"]]  # the notebook keeps its kernel


def test_without_a_broker_the_server_says_that_it_is_not_available(world: World) -> None:
    (name,) = world.install(500)
    world.environment["JUPYTER_GPU_SIMULATE"] = "1xlots"
    with Server(world) as server:
        status, message = refused(server, "POST", "api/kernels", {"name": name})
        assert status == 503
        assert "lots" in message


def test_an_error_at_a_start_is_the_projects_own_and_a_servers() -> None:
    error: Any = start_error(NoRoomError("100% of it\nis taken.", reason="seat-full"), "Kernel 'a': ")
    assert {NoRoomError, HTTPError} <= set(type(error).__mro__)
    assert (error.status_code, error.reason, str(error)) == (409, "seat-full", "Kernel 'a': 100 percent of it is taken")
    assert error.log_message == str(error)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - a process pool does it
    assert (type(again), str(again), again.reason) == (type(error), str(error), "seat-full")


@pytest.mark.parametrize("kind", [UnauthorizedError, FractionalGPUError])
def test_what_the_broker_thinks_of_the_server_is_not_said_of_the_browser(kind: type[FractionalGPUError]) -> None:
    error: Any = start_error(kind("the seat has ended"))
    assert isinstance(error, HTTPError)
    assert error.status_code == 500
