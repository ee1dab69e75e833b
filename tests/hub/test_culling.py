"""A hub's idle culler stops idle servers, but none whose kernels hold GPU state; the broker ends these when host memory is scarce.

JUPYTER_GPU_CULLING_USERS sets how many users hold GPU state (2), the last of them when all but one fit into host memory.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from fractional_gpu.core.model import LeaseState
from tests.support.hub import HubWorld, new_hub
from tests.support.stories import CHECK, fill
from tests.support.world import Notebook, World, new_world, until

pytestmark = pytest.mark.promise("culling")

USERS = int(os.environ.get("JUPYTER_GPU_CULLING_USERS", "2"))
KERNEL = "fractional-gpu-default-500"
IDLE_S = 7
SAVED_MIB = 36  # of each kernel: what it wrote and its context
ABOVE = 100 * (USERS - 1) // USERS + 2  # percent: all but one fit
SETTINGS = {
    "pools": {"default": {"oversubscription": USERS, "wait_bound": "100%", "idle_after": "1s"}},
    "host_memory": f"{SAVED_MIB * USERS}MiB",
    "cull_idle_after": "1h",
    "cull_above": ABOVE,
    "cull_warning": "1s",
}


@contextmanager
def idle_culler(hub: HubWorld) -> Iterator[None]:
    """The hub's culler, which looks every second."""
    command = [sys.executable, "-m", "jupyterhub_idle_culler", f"--timeout={IDLE_S}", "--cull-every=1"]
    environment = {**hub.world.environment, "JUPYTERHUB_API_TOKEN": hub.token}
    with subprocess.Popen([*command, f"--url={hub.url}hub/api"], env=environment, stderr=subprocess.DEVNULL) as culler:
        try:
            yield
        finally:
            culler.terminate()


def runs(hub: HubWorld, user: str) -> bool:
    return "" in hub.api("GET", f"users/{user}")["servers"]


def suspended(world: World) -> list[str]:
    return [one.kernel_id for one in world.status().leases if one.state == LeaseState.SUSPENDED]


@pytest.mark.timeout(600)
def test_users_with_suspended_kernels_keep_them_until_host_memory_is_scarce_and_others_are_culled_as_before() -> None:
    with ExitStack() as stack:
        world = stack.enter_context(new_world("1x192MiB"))
        world.install(500)
        environment = {**_kept(world), "JUPYTERHUB_ACTIVITY_INTERVAL": "2"}
        hub = stack.enter_context(new_hub(world, SETTINGS, environment=environment))
        notebooks = [start(hub, number) for number in range(USERS - 1)]
        until(lambda: len(suspended(world)) == USERS - 1, "all are suspended")
        with idle_culler(hub):
            plain = hub.server("plain", fraction="none")
            assert plain.request("GET", "api/kernels") == []
            until(lambda: not runs(hub, "plain"), "a server without a GPU is culled, though others were idle longer")
        assert all(runs(hub, f"user{number}") for number in range(USERS - 1))
        for notebook in notebooks:
            assert notebook.must(CHECK).text == "intact\n"

        notebooks.append(start(hub, USERS - 1))
        last = notebooks[-1].kernel_id
        until(lambda: last in suspended(world), "the last is suspended")
        until(lambda: world.status().host_saved_mib <= ABOVE / 100 * SAVED_MIB * USERS, "host memory is free again")
        assert {one.kernel_id for one in world.status().leases} == {one.kernel_id for one in notebooks[1:]}, (
            "the one that was idle longest has ended"
        )
        for notebook in notebooks[1:]:
            assert notebook.must(CHECK).text == "intact\n"


def start(hub: HubWorld, number: int) -> Notebook:
    notebook = hub.server(f"user{number}", pool="default", fraction="1/2").start(KERNEL)
    notebook.must(fill(number))
    return notebook


def _kept(world: World) -> dict[str, str]:
    return {name: world.environment[name] for name in ("JUPYTER_PATH", "JUPYTER_DATA_DIR", "PYTHONPATH", "IPYTHONDIR")}
