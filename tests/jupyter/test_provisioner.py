"""Kernels start with their lease, keep it over restarts, give it back, and say why when they cannot have one."""

import ast
import asyncio
import os
import signal
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.client.discovery import ensure_broker
from fractional_gpu.jupyter import kernel_lease
from fractional_gpu.jupyter import provisioner as provisioning
from fractional_gpu.jupyter.kernel_command import KernelPlan, plan_kernel
from fractional_gpu.jupyter.kernel_process import ProcessGoneError
from fractional_gpu.jupyter.provisioner import FractionalGPUProvisioner
from fractional_gpu.protocol.errors import BadRequestError, BrokerUnavailableError, FractionalGPUError, NoRoomError
from fractional_gpu.protocol.limits import MAX_NAME
from fractional_gpu.protocol.messages import AttachRequest
from tests.jupyter.conftest import Places
from tests.support.descriptors import no_free_descriptors
from tests.support.fake_broker import FakeBroker
from tests.support.kernels import KERNEL_DEADLINE_S, evaluate, running_kernel, talking_to
from tests.support.stories import SLEEPS


def provisioner_of(manager: KernelManager) -> FractionalGPUProvisioner:
    assert isinstance(manager.provisioner, FractionalGPUProvisioner)
    return manager.provisioner


def test_a_broker_is_started_while_the_interpreter_is_asked(
    places: Places, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    def starts(*arguments: Any, **keywords: Any) -> BrokerClient:  # noqa: ANN401 - passed on
        begun.set()
        return ensure_broker(*arguments, **keywords)

    def asks(*arguments: Any) -> KernelPlan:  # noqa: ANN401 - passed on
        assert begun.wait(KERNEL_DEADLINE_S), "the broker's start waits for the interpreter"
        return plan_kernel(*arguments)

    monkeypatch.setattr(kernel_lease, "ensure_broker", starts)
    monkeypatch.setattr(provisioning, "plan_kernel", asks)
    with running_kernel(places.write_gpu_spec(), cwd=str(places.work)):
        assert broker.only_lease()


def token_files(places: Places) -> list[Path]:
    return list((places.specs.parent.parent / "runtime" / "gpu").glob("*.token"))


def test_a_kernel_starts_with_its_lease_and_gives_it_back(places: Places, broker: FakeBroker) -> None:
    broker.environment = {"CUDA_VISIBLE_DEVICES": "", "JUPYTER_GPU_SIMULATED_DIR": "/sim"}
    name = places.write_gpu_spec(fraction="1/2", memory="4GiB", priority=2, pool="teaching")
    with running_kernel(name, cwd=str(places.work)) as manager:
        lease_id, lease = broker.only_lease()
        assert lease.state == "unarmed"
        assert lease.request | {"kernel_id": "", "label": ""} == {
            "fraction_milli": 500, "pool": "teaching", "memory_mib": 4096, "request_mib": None, "devices": 1, "priority": 2,
            "kernel_id": "", "label": "", "gated": True, "wait_ms": 0, "seat": "", "kind": "kernel", "ttl_ms": 0, "holder_pid": 0,
        }  # fmt: skip
        assert lease.request["kernel_id"] == manager.kernel_id
        (token_file,) = token_files(places)
        assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
        assert token_file.read_text() == lease.token
        with talking_to(manager) as client:
            names = "SOCKET", "LEASE", "TOKEN_FILE", "MEMORY_MIB", "SIMULATED_DIR", "NOTICE"
            values = evaluate(client, f"[__import__('os').environ.get('JUPYTER_GPU_' + n) for n in {names}]")
            assert ast.literal_eval(values) == [broker.path, lease_id, str(token_file), "2048", "/sim", None]
            assert "site-packages/fractional_gpu_kernel" in evaluate(client, "gpu_extension")
            assert lease.attach["pid"] == int(evaluate(client, "__import__('os').getpid()"))
        assert lease.attach["connection"]["key"] == manager.session.key.decode()
        assert lease.attach["connection"]["iopub_port"] == manager.iopub_port
        assert (lease.attach["ipykernel"], lease.attach["language"]) == (True, "python")
        assert lease.attach["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        started = Path(f"/proc/{lease.attach['pid']}/stat").read_text().split(")")[1].split()[19]
        assert lease.attach["start_time"] == int(started)
    assert broker.leases[lease_id].state == "ended"
    assert token_files(places) == []


CONFIGURATION = """
(lambda sys, app: {
    "configuration": [str(app.config[section] | {"connection_file": ""}) for section in sorted(app.config)],
    "extensions": [app.extensions, app.extra_extensions],
    "loaded": sorted(app.shell.extension_manager.loaded - {"fractional_gpu_kernel"}),
    "arguments": [word for word in sys.argv if not word.endswith(".json")],
    "path": sys.path,
    "flags": str(sys.flags),
    "main": sys.modules["__main__"].__name__,
})(__import__("sys"), get_ipython().kernel.parent)
"""


@pytest.mark.usefixtures("broker")
@pytest.mark.parametrize(
    ("file", "text", "arguments"),
    [
        ("ipython_kernel_config.py", "c.IPKernelApp.extra_extensions = ['mine']", []),
        ("ipython_config.json", '{"InteractiveShellApp": {"extra_extensions": ["mine"]}}', []),
        ("site.py", "c.InteractiveShellApp.extra_extensions.append('mine')", ["--config=site.py"]),
        ("none.py", "", ["--ext", "mine"]),
    ],
)
def test_a_kernel_has_the_configuration_that_it_has_without_us(
    places: Places, file: str, text: str, arguments: list[str]
) -> None:
    """And our extension, also next to modules that have names of the standard library's."""
    (profile := Path(os.environ["IPYTHONDIR"], "profile_default")).mkdir(parents=True)
    (profile / file).write_text(text)
    (places.work / "mine.py").write_text("def load_ipython_extension(shell): shell.user_ns['mine'] = 1")
    (places.work / "typing.py").write_text("raise ImportError('not the one of the standard library')")
    argv = [places.python, "-m", "ipykernel_launcher", "-f", "{connection_file}", *arguments]
    found = []
    for name in (places.write_spec("local", argv), places.write_gpu_spec("gpu", argv)):
        with running_kernel(name, cwd=str(places.work)) as manager, talking_to(manager) as client:
            found.append(ast.literal_eval(evaluate(client, CONFIGURATION)))
            assert evaluate(client, "mine") == "1"
            assert ("site-packages/fractional_gpu_kernel" in evaluate(client, "gpu_extension")) == (name == "gpu")
    assert found[0] == found[1]


def test_a_name_that_is_not_valid_text_keeps_no_kernel_from_its_start(
    places: Places, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JPY_SESSION_NAME", os.fsdecode(b"/home/me/\xfcbung.ipynb"))  # Latin-1
    with running_kernel(places.write_gpu_spec(), cwd=str(places.work)):
        assert broker.only_lease()[1].request["label"] == "/home/me/?bung.ipynb"


def test_an_id_longer_than_a_request_may_name_keeps_no_kernel_from_its_start(
    places: Places, broker: FakeBroker
) -> None:
    """A program may choose any id that can be in a connection file's name."""
    with running_kernel(places.write_gpu_spec(), cwd=str(places.work), kernel_id="k" * (MAX_NAME + 1)):
        assert broker.only_lease()[1].request["kernel_id"] == "k" * MAX_NAME


@pytest.mark.usefixtures("broker")
def test_an_interrupt_reaches_the_kernel(places: Places) -> None:
    with running_kernel(places.write_gpu_spec()) as manager, talking_to(manager) as client:
        message = client.execute(f"print('ready')\n{SLEEPS}")
        while client.get_iopub_msg(timeout=KERNEL_DEADLINE_S)["msg_type"] != "stream":
            pass
        manager.interrupt_kernel()
        reply = client.get_shell_msg(timeout=KERNEL_DEADLINE_S)
        while reply["parent_header"].get("msg_id") != message:
            reply = client.get_shell_msg(timeout=KERNEL_DEADLINE_S)
        assert reply["content"]["ename"] == "KeyboardInterrupt"


def test_a_restart_politely_or_now_keeps_the_lease(places: Places, broker: FakeBroker) -> None:
    with running_kernel(places.write_gpu_spec()) as manager:
        with talking_to(manager):
            before = broker.only_lease()[1].attach["pid"]
        for restarts, now in ((1, False), (2, True)):
            manager.restart_kernel(now=now)
            lease_id, lease = broker.only_lease()
            assert lease_id == "lease-1"
            assert lease.state == "unarmed"
            assert lease.attach["pid"] != before
            before = lease.attach["pid"]
            assert broker.routes().count("create") == 1
            assert broker.routes().count("detach") == restarts
            with talking_to(manager) as client:
                assert evaluate(client, "__import__('os').environ['JUPYTER_GPU_LEASE']") == "'lease-1'"
    assert broker.leases["lease-1"].state == "ended"


def test_a_restart_takes_a_new_lease_if_the_broker_forgot_the_old_one(places: Places, broker: FakeBroker) -> None:
    with running_kernel(places.write_gpu_spec()) as manager:
        broker.leases["lease-1"].state = "ended"
        manager.restart_kernel(now=True)
        assert broker.only_lease()[0] == "lease-2"
        assert len(token_files(places)) == 1
    assert token_files(places) == []


def test_a_restart_writes_the_token_again_if_its_file_was_swept_away(places: Places, broker: FakeBroker) -> None:
    with running_kernel(places.write_gpu_spec()) as manager:
        token_files(places)[0].unlink()
        manager.restart_kernel(now=True)
        (token_file,) = token_files(places)
        assert token_file.read_text() == broker.only_lease()[1].token


def test_a_restart_without_room_starts_without_a_gpu_and_says_why(places: Places, broker: FakeBroker) -> None:
    with running_kernel(places.write_gpu_spec()) as manager:
        broker.leases["lease-1"].state = "ended"
        broker.fail["create"] = NoRoomError("asked for 1/4, the pool is 100% full")
        manager.restart_kernel(now=True)
        with talking_to(manager) as client:
            notice = evaluate(client, "__import__('os').environ['JUPYTER_GPU_NOTICE']")
            assert "asked for 1/4, the pool is 100 percent full." in notice
            assert evaluate(client, "__import__('os').environ['CUDA_VISIBLE_DEVICES']") == "''"
            assert evaluate(client, "__import__('os').environ.get('JUPYTER_GPU_LEASE')") == "None"
            assert "fractional_gpu_kernel" in evaluate(client, "gpu_extension")
        del broker.fail["create"]
        manager.restart_kernel(now=True)
        assert broker.only_lease()[1].state == "unarmed"


def test_a_restart_whose_attach_fails_starts_without_a_gpu(places: Places, broker: FakeBroker) -> None:
    with running_kernel(places.write_gpu_spec()) as manager:
        broker.fail["attach"] = FractionalGPUError("the pid is not yours")
        manager.restart_kernel(now=True)
        with talking_to(manager) as client:
            assert "the pid is not yours" in evaluate(client, "__import__('os').environ['JUPYTER_GPU_NOTICE']")
    assert broker.leases["lease-1"].state == "ended"


def ends_meanwhile(pid: int, *_: object, **__: object) -> AttachRequest:
    """Instead of `attach_request`: the process has ended since it was found."""
    raise ProcessGoneError(f"process {pid} has ended")


def test_a_restart_whose_process_ends_at_once_starts_without_a_gpu(
    places: Places, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_kernel(places.write_gpu_spec()) as manager:
        monkeypatch.setattr(provisioning, "attach_request", ends_meanwhile)
        manager.restart_kernel(now=True)
        with talking_to(manager) as client:
            notice = evaluate(client, "__import__('os').environ['JUPYTER_GPU_NOTICE']")
            assert notice
    assert broker.leases["lease-1"].state == "ended"


def test_a_process_that_ends_at_once_is_one_sentence_at_the_first_start_and_leaves_nothing(
    places: Places, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provisioning, "attach_request", ends_meanwhile)
    manager = KernelManager(kernel_name=places.write_gpu_spec())
    with pytest.raises(FractionalGPUError, match=r"the server's log$"):
        manager.start_kernel()
    assert broker.leases["lease-1"].state == "ended"
    assert token_files(places) == []


def test_a_restart_while_the_broker_is_away_starts_without_a_gpu(places: Places, broker: FakeBroker) -> None:
    settings = Path(broker.path).with_name("broker.json")
    settings.write_text('{"argv": ["/bin/sh", "-c", "echo the driver is gone >&2; exit 1"]}')
    settings.chmod(0o600)
    with running_kernel(places.write_gpu_spec()) as manager:
        broker.stop()
        manager.restart_kernel(now=True)
        with talking_to(manager) as client:
            assert "the driver is gone" in evaluate(client, "__import__('os').environ['JUPYTER_GPU_NOTICE']")
        broker.start()
        manager.restart_kernel(now=True)
        lease_id, lease = broker.only_lease()
        assert lease_id == "lease-1", "the same one: it was kept in mind"
        assert lease.state in {"unarmed", "resident"}, (
            "attached; the end of the process before may have asked for its memory late"
        )


def test_no_room_at_the_first_start_is_one_sentence_and_leaves_nothing(places: Places, broker: FakeBroker) -> None:
    text = "asked for 1/4 of a GPU,\nall of pool default is taken (100%); shut a kernel down."
    broker.fail["create"] = NoRoomError(text)
    manager = KernelManager(kernel_name=places.write_gpu_spec())
    with pytest.raises(NoRoomError) as caught:
        manager.start_kernel()
    assert str(caught.value) == "asked for 1/4 of a GPU, all of pool default is taken (100 percent); shut a kernel down"
    assert not manager.has_kernel
    assert token_files(places) == []
    del broker.fail["create"]
    manager.start_kernel()
    assert broker.only_lease()[1].state == "unarmed"
    manager.shutdown_kernel(now=True)


def test_a_failed_attach_at_the_first_start_kills_the_process_and_gives_back(
    places: Places, broker: FakeBroker
) -> None:
    broker.fail["attach"] = FractionalGPUError("the pid is not yours")
    manager = KernelManager(kernel_name=places.write_gpu_spec())
    with pytest.raises(FractionalGPUError, match="the pid is not yours"):
        manager.start_kernel()
    (attach,) = broker.bodies("attach")
    assert not Path(f"/proc/{attach['pid']}").exists()
    assert not manager.has_kernel
    assert broker.leases["lease-1"].state == "ended"
    assert token_files(places) == []


def test_a_wrong_stanza_is_named_before_anything_is_started(places: Places, broker: FakeBroker) -> None:
    manager = KernelManager(kernel_name=places.write_gpu_spec(fractoin=0.5))
    with pytest.raises(BadRequestError, match=r"Kernel 'gpu': .*'fractoin'; did you mean 'fraction'?"):
        manager.start_kernel()
    assert broker.calls == []


def test_no_broker_at_the_first_start_says_what_the_start_command_said(places: Places, broker: FakeBroker) -> None:
    broker.stop()
    settings = Path(broker.path).with_name("broker.json")
    settings.write_text('{"argv": ["/bin/sh", "-c", "echo no NVIDIA driver was found >&2; exit 1"]}')
    settings.chmod(0o600)
    manager = KernelManager(kernel_name=places.write_gpu_spec())
    with pytest.raises(BrokerUnavailableError, match="no NVIDIA driver was found"):
        manager.start_kernel()


def test_cleanup_may_come_twice_or_find_no_broker(places: Places, broker: FakeBroker) -> None:
    manager = KernelManager(kernel_name=places.write_gpu_spec())
    manager.start_kernel()
    broker.fail["release"] = FractionalGPUError("not now")
    manager.shutdown_kernel(now=True)
    manager.cleanup_resources()
    assert broker.routes().count("release") == 1
    assert token_files(places) == []
    manager = KernelManager(kernel_name="gpu")
    manager.start_kernel()
    assert len(token_files(places)) == 1
    broker.stop()
    manager.shutdown_kernel(now=True)
    assert token_files(places) == []


def test_a_suspended_kernel_is_killed_at_once_when_it_does_not_go(places: Places, broker: FakeBroker) -> None:
    with running_kernel(places.write_gpu_spec()) as manager:
        manager.shutdown_wait_time = KERNEL_DEADLINE_S  # what a polite end would take
        provisioner, (_, lease) = provisioner_of(manager), broker.only_lease()
        with talking_to(manager) as client:
            client.execute("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)", reply=True)
        process = provisioner.process
        assert process is not None
        manager._send_kernel_sigterm()
        assert process.poll() is None  # not suspended: asked, not killed
        lease.state = "suspended"
        manager._send_kernel_sigterm()
        assert process.wait(KERNEL_DEADLINE_S) == -signal.SIGKILL


async def test_a_server_that_can_open_nothing_more_ends_its_kernels_all_the_same(
    places: Places, broker: FakeBroker
) -> None:
    manager = KernelManager(kernel_name=places.write_gpu_spec())
    await manager._async_start_kernel()
    process = provisioner_of(manager).process
    assert process is not None
    try:
        with no_free_descriptors():
            await provisioner_of(manager).terminate()
        assert process.wait(KERNEL_DEADLINE_S) is not None
    finally:
        await manager._async_shutdown_kernel(now=True)
    assert broker.leases["lease-1"].state == "ended"


@pytest.mark.promise("race-first-use")
def test_a_kernel_without_the_extension_asks_for_its_reservation_at_once(places: Places, broker: FakeBroker) -> None:
    bare = places.write_gpu_spec("bare", ["/bin/sh", "-c", "sleep 1000"])
    with running_kernel(bare) as manager:
        first = broker.only_lease()[1].attach
        assert first["ipykernel"] is False
        assert broker.bodies("create")[0] | {"kernel_id": ""} == broker.bodies("create")[0] | {
            "gated": False, "wait_ms": 10_000, "kernel_id": "",
        }  # fmt: skip
        manager.restart_kernel(now=True)  # its device must be known before the process is: a new lease
        assert broker.only_lease()[0] == "lease-2"
        assert broker.leases["lease-1"].state == "ended"


def test_a_command_that_does_not_exist_leaves_no_lease(places: Places, broker: FakeBroker) -> None:
    manager = KernelManager(kernel_name=places.write_gpu_spec("none", ["/nowhere/kernel"]))
    with pytest.raises(FileNotFoundError):
        manager.start_kernel()
    assert broker.leases["lease-1"].state == "ended"
    assert token_files(places) == []


def test_a_server_that_runs_under_a_lease_does_not_hand_it_on(
    places: Places, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_GPU_NOTICE", "old news")
    monkeypatch.setenv("JUPYTER_GPU_SIMULATED_DEVICE", "sim-7")
    with running_kernel(places.write_gpu_spec()) as manager, talking_to(manager) as client:
        names = "NOTICE", "SIMULATED_DEVICE"
        values = evaluate(client, f"[__import__('os').environ.get('JUPYTER_GPU_' + n) for n in {names}]")
        assert values == "[None, None]"
    assert broker.leases["lease-1"].state == "ended"


async def test_a_provisioner_can_be_persisted_and_taken_over(places: Places, broker: FakeBroker) -> None:
    manager = KernelManager(kernel_name=places.write_gpu_spec())
    await manager._async_start_kernel()
    try:
        first = provisioner_of(manager)
        info = await first.get_provisioner_info()
        assert info["gpu_lease"]["lease_id"] == "lease-1"
        assert broker.leases["lease-1"].token not in str(info["gpu_lease"])
        second = FractionalGPUProvisioner(kernel_id=first.kernel_id, kernel_spec=first.kernel_spec, parent=manager)
        attached = len(broker.routes())
        await second.load_provisioner_info(info)
        assert "attach" in broker.routes()[attached:], "the broker knows which server has the kernel"
        await second.cleanup(restart=False)
        assert broker.leases["lease-1"].state == "ended"
        third = FractionalGPUProvisioner(kernel_id=first.kernel_id, kernel_spec=first.kernel_spec, parent=manager)
        await third.load_provisioner_info(info)  # the token is gone: no error, no lease
        assert "gpu_lease" not in await third.get_provisioner_info()
    finally:
        await manager._async_shutdown_kernel(now=True)


def test_the_event_loop_is_not_held_up_by_a_slow_broker(places: Places, broker: FakeBroker) -> None:
    broker.held["create"] = threading.Event()

    async def start_and_count() -> None:
        manager = KernelManager(kernel_name=places.write_gpu_spec())
        start = asyncio.ensure_future(manager._async_start_kernel())
        await asyncio.to_thread(broker.wait_for, lambda: "create" in broker.routes())
        assert not start.done()  # the broker holds it up, and this line still runs
        broker.held["create"].set()
        await start
        await manager._async_shutdown_kernel(now=True)

    asyncio.run(start_and_count())
    assert broker.leases["lease-1"].state == "ended"
