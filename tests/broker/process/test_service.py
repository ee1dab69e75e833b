"""A broker as a node's service on any socket; and where none may start: in a job or a pod, as it would end with that."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fractional_gpu.broker.process import restarting
from fractional_gpu.broker.process.driver_start import simulated_folder
from fractional_gpu.client.client import BrokerClient
from fractional_gpu.client.discovery import IN_WORKLOAD, ensure_broker
from fractional_gpu.protocol.errors import BrokerUnavailableError
from tests.broker.live import BECOME_NOBODY, DEADLINE_S
from tests.support.callers import caller
from tests.support.control_group import JOIN, job_group
from tests.support.paths import PYTHONPATH
from tests.support.world import until

pytestmark = pytest.mark.promise("workload-broker")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that all users may enter."""
    made = Path(tempfile.mkdtemp(prefix="jfg-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)
    shutil.rmtree(simulated_folder(str(made / "gpu" / "broker.sock")), ignore_errors=True)  # a living lease keeps it


def command(folder: Path, *words: str) -> list[str]:
    serve = ["broker", "--service", "--socket", str(folder / "gpu" / "broker.sock"), "--simulate", "1x1GiB"]
    return [sys.executable, "-m", "fractional_gpu.commands.main", *serve, "--state-dir", str(folder / "state"), *words]


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JUPYTER")}
    return {**kept, "PYTHONPATH": PYTHONPATH}


def answers(socket: str) -> bool | None:
    try:
        with BrokerClient(socket, timeout_s=DEADLINE_S) as client:
            return client.ping().simulated
    except BrokerUnavailableError:
        return None


def test_a_service_serves_every_user_on_any_socket_until_it_is_told_to_stop(folder: Path) -> None:
    socket = folder / "gpu" / "broker.sock"
    with subprocess.Popen(command(folder), env=environment(), umask=0o077) as service:
        try:
            until(lambda: answers(str(socket)), "it serves")
            assert oct(socket.parent.stat().st_mode & 0o777) == "0o755"
            assert oct(socket.stat().st_mode & 0o777) == "0o666"
            with caller(str(socket), first=BECOME_NOBODY) as user:
                status, status_of = user.call("GET", "/v1/status")
                assert (status, status_of["simulated"]) == (200, True)
                status, lease = user.call("POST", "/v1/leases", body={"fraction_milli": 250})
                assert status == 200, lease
                status, refused = user.call(
                    "POST", "/v1/seats", body={"owner": "nobody", "pool": "default", "fraction_milli": 250}
                )
                assert (status, refused["error"]["reason"]) == (403, "not-admin")
            private = [one.name for one in socket.parent.iterdir() if one != socket and one.stat().st_mode & 0o077]
            assert not private, "its other files are its own"
        finally:
            service.send_signal(signal.SIGTERM)
        assert service.wait(DEADLINE_S) == 0


def test_a_service_counts_uids_without_a_user_for_the_account_that_it_was_given(folder: Path) -> None:
    socket = str(folder / "gpu" / "broker.sock")
    argv = command(folder, "--settings", '{"account_of_unknown_uids": "daemon"}')
    with subprocess.Popen(argv, env=environment()) as service:
        try:
            until(lambda: answers(socket), "it serves")
            with caller(socket, first="os.setgroups([]); os.setgid(400000); os.setuid(400000)") as user:
                assert user.call("POST", "/v1/leases", body={"fraction_milli": 250})[0] == 200
                assert [lease["lease"]["spec"]["owner"] for lease in user.call("GET", "/v1/status")[1]["leases"]] == [
                    "daemon"
                ]
        finally:
            service.send_signal(signal.SIGTERM)
        assert service.wait(DEADLINE_S) == 0


def test_a_service_refuses_to_run_in_a_job(folder: Path) -> None:
    with job_group() as (job, group):
        join = f"{JOIN.format(group=str(group))}; import sys; os.execv(sys.argv[1], sys.argv[1:])"
        done = subprocess.run(
            [sys.executable, "-c", join, *command(folder)],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    assert done.returncode == 1
    assert f"this is Slurm job {job}" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_service_is_roots_and_where_users_reach_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = folder / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(BrokerUnavailableError, match=f"users cannot enter {closed}"):
        restarting.make_socket_folder(str(closed / "gpu" / "broker.sock"), service=True)
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    with pytest.raises(BrokerUnavailableError, match="must run as root, but this is uid 1234"):
        restarting.make_socket_folder(str(folder / "gpu" / "broker.sock"), service=True)


# -- no automatic broker -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("SLURM_JOB_ID", "4711", "Slurm job 4711"), ("KUBERNETES_SERVICE_HOST", "10.0.0.1", "a Kubernetes pod")],
)
def test_in_a_job_or_pod_no_broker_starts_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.delenv(IN_WORKLOAD, raising=False)
    monkeypatch.setenv(name, value)
    socket = str(tmp_path / "broker.sock")
    with pytest.raises(BrokerUnavailableError, match=f"none is started inside {said}") as refused:
        ensure_broker(socket)
    assert refused.value.reason == "in-workload"
    assert "jupyter gpu broker --service" in str(refused.value)
    assert not list(tmp_path.iterdir()), "nothing was tried"


def test_the_control_group_tells_a_job_too_and_a_job_may_be_allowed_its_own(folder: Path) -> None:
    run = folder / "run"
    run.mkdir(mode=0o700)
    start = """
import sys
from fractional_gpu.client.discovery import ensure_broker
from fractional_gpu.protocol.errors import BrokerUnavailableError
try:
    with ensure_broker(sys.argv[1]) as client:
        print(client.ping().pid)
except BrokerUnavailableError as error:
    print(error.reason)
"""
    with job_group() as (_, group):
        program = f"{JOIN.format(group=str(group))}\n{start}"
        own = {**environment(), "JUPYTER_GPU_SIMULATE": "1x1GiB", "XDG_STATE_HOME": str(folder / "state")}

        def ask(**more: str) -> str:
            argv = [sys.executable, "-c", program, str(run / "broker.sock")]
            done = subprocess.run(argv, env={**own, **more}, capture_output=True, text=True, timeout=60, check=True)
            return done.stdout.strip()

        assert ask() == "in-workload"
        pid = int(ask(**{IN_WORKLOAD: "1"}))
        os.kill(pid, signal.SIGTERM)
        until(lambda: not Path(f"/proc/{pid}").exists() or None, "it ended")
        until(lambda: not (group / "cgroup.procs").read_text() or None, "and with it what it started")


def test_a_users_kernel_never_starts_a_broker_in_roots_folder(folder: Path) -> None:
    """If a service on a custom path is not running, only its administrator may start it."""
    socket = folder / f"gpu-{secrets.token_hex(4)}" / "broker.sock"
    socket.parent.mkdir(mode=0o755)
    ask = f"""
import os, pwd, sys
from fractional_gpu.client import discovery
from fractional_gpu.client.discovery import ensure_broker
discovery._RESTART_S = 0.1
from fractional_gpu.protocol.errors import BrokerUnavailableError
import fractional_gpu.client.client, fractional_gpu.host.workload, encodings.idna
{BECOME_NOBODY}
try:
    ensure_broker({str(socket)!r})
except BrokerUnavailableError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", ask], env=environment(), capture_output=True, text=True, timeout=60, check=True, cwd="/"
    )
    assert "is a system service that is not running" in done.stdout


def test_a_user_who_starts_a_broker_on_a_services_socket_is_told_whose_it_is() -> None:
    ask = f"""
from fractional_gpu.broker.process.restarting import make_socket_folder
from fractional_gpu.protocol.errors import BrokerUnavailableError
{BECOME_NOBODY}
try:
    make_socket_folder("/run/broker.sock")
except BrokerUnavailableError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", ask], env=environment(), capture_output=True, text=True, timeout=60, check=True, cwd="/"
    )
    assert "is the socket of a system service" in done.stdout
    assert "--socket" in done.stdout
