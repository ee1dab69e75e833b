"""`jupyter gpu run`: scripts and servers with a kernel's lease, in real processes on the simulated device."""

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from jupyter_client.manager import KernelManager

from fractional_gpu.client.seat import SEAT_FILE_VARIABLE, Seat, SeatClient, write_seat
from fractional_gpu.protocol.seats import SeatRequest
from tests.support.managed import client_of, entered, must
from tests.support.ports import free_port
from tests.support.runs import READER, SERVER, Run, intact
from tests.support.stories import CHECK, fill
from tests.support.world import DEADLINE_S, World, new_world, until

pytestmark = pytest.mark.promise("commands-run")

QUICK = "c.GPUBroker.pools = {'default': {'idle_after': 0, 'min_residency': 0}}"
PAST = """
from fractional_gpu.gpu.simulated import context, cuda
context.memory_cap_bytes = lambda: None  # as what allocates directly: it knows no cap
buffer = cuda.allocate(400 << 20)
print("ready", flush=True)
input()
"""
STUBBORN = """
import signal, time
from fractional_gpu.gpu.simulated import cuda
signal.signal(signal.SIGTERM, lambda *_: print("asked to end", flush=True))
signal.signal(signal.SIGUSR1, lambda *_: print("told", flush=True))
print("ready", flush=True)
while True: time.sleep(0.05)
"""
WAITS = "jupyter gpu run: waiting for the GPU: "


@pytest.fixture(scope="module")
def shared() -> Iterator[World]:
    """One world, and if possible one broker, for this file's tests. Runs end with their tests."""
    with new_world() as world:
        world.configure(QUICK)
        yield world


@contextmanager
def pool(world: World, *keys: str) -> Iterator[None]:
    if world.broker_pid() is None:
        world.start_broker()
    assert world.command("pool", "default", *keys).returncode == 0
    yield
    assert world.command("pool", "default", "idle_after=0", "breach=warn").returncode == 0


def run_to_end(world: World, *words: str) -> tuple[int, str, str]:
    with Run(world, "short", *words) as run:
        status, complaint = run.end()
        assert run.process.stdout is not None
        return status, run.process.stdout.read(), complaint


def beside_waits(complaint: str) -> str:
    """Return the output without lines about waits: a slow machine has some that are long enough to be reported."""
    return "".join(line for line in complaint.splitlines(keepends=True) if not line.startswith(WAITS))


# -- scripts -----------------------------------------------------------------------------------------------------------


def test_a_script_has_the_variables_of_a_kernel_and_its_exit_status_is_that_of_the_command(shared: World) -> None:
    names = "JUPYTER_GPU_LEASE", "JUPYTER_GPU_MEMORY_MIB", "JUPYTER_GPU_MEMORY_FRACTION", "CUPY_GPU_MEMORY_LIMIT"
    program = f"import os; print(*(os.environ.get(name) for name in {names})); raise SystemExit(7)"
    status, printed, complaint = run_to_end(shared, "--fraction", "1/4", "--", sys.executable, "-c", program)
    assert (status, beside_waits(complaint)) == (7, "")
    lease_id, mib, fraction, cupy = printed.split()
    assert (len(lease_id), mib, fraction, cupy) == (24, "256", "0.1250", str(128 << 20))
    assert [lease for lease in shared.status().leases if lease.lease_id == lease_id] == []


def test_an_idle_script_is_suspended_and_back_for_its_next_call_with_all_its_bytes(shared: World) -> None:
    with Run.python(shared, "reader", READER) as run:
        lease = run.await_state("suspended")
        assert (lease.kind, lease.lease.saved_mib > 4) == ("command", True)
        assert "reader (command)" in shared.command("status").stdout
        assert run.ask() == "intact\n"
        again = run.await_state("suspended")
        assert shared.command("resume", lease.lease_id).returncode == 0
        assert again.resumes >= 1
        status, complaint = run.end()
        assert (status, beside_waits(complaint)) == (0, "")
        run.await_no_lease()


def test_two_commands_take_turns_beside_a_kernel(shared: World) -> None:
    (name,) = shared.install(750)
    with entered(shared):
        manager = KernelManager(kernel_name=name)
        manager.start_kernel()
        try:
            with (
                client_of(manager) as client,
                Run.python(shared, "one", READER) as one,
                Run.python(shared, "two", READER) as two,
            ):
                must(client, fill(5))
                assert (one.ask(), two.ask()) == ("intact\n", "intact\n")
                assert must(client, CHECK) == "intact\n"
                assert (one.ask(), two.ask()) == ("intact\n", "intact\n")
                assert one.end()[0] == two.end()[0] == 0
        finally:
            manager.shutdown_kernel(now=True)


def test_a_wait_is_told_with_its_reason_and_has_a_limit(shared: World) -> None:
    with pool(shared, "idle_after=on-demand"), Run.python(shared, "holds", READER) as holds:
        holds.pin()
        status, _, complaint = run_to_end(
            shared, "--fraction", "3/4", "--wait", "3.5s", "--", "true"
        )  # reported after 2 s
    assert status == 1
    told, refused = complaint.splitlines()
    assert told.startswith(WAITS)
    assert "holds" in told
    assert "; place 1 in the queue" in told
    assert refused.startswith("jupyter gpu: no GPU became free in time: ")


def test_in_a_hubs_terminal_it_draws_on_the_servers_seat(shared: World) -> None:
    if shared.broker_pid() is None:
        shared.start_broker()
    request = SeatRequest(owner="ada", pool="default", fraction_milli=500, server="lab")
    file = shared.folder / "seat.json"
    with SeatClient(shared.socket) as hub:
        *_, seat = hub.take_seat(request)
        terms = Seat(seat_id=seat.seat_id, token=seat.token, pool="default", fraction_milli=500, memory_mib=512)
        write_seat(terms, file)
        shared.environment[SEAT_FILE_VARIABLE] = str(file)
        try:
            with Run.python(shared, "seated", READER, options=("--fraction", "1/2")) as run:
                lease = run.await_state("suspended")
                assert (lease.spec.owner, lease.spec.seat) == ("ada", seat.seat_id)
                assert run.ask() == "intact\n"
                status, _, complaint = run_to_end(shared, "--fraction", "1/2", "--", "true")
                assert (status, "this server has 1/2 GPU with 512 MiB" in complaint) == (1, True), complaint
                assert run.end()[0] == 0
        finally:
            del shared.environment[SEAT_FILE_VARIABLE]
            hub.release_seat(seat.seat_id)


# -- servers -----------------------------------------------------------------------------------------------------------


def test_a_server_is_suspended_without_connections_and_back_at_the_first_one(shared: World) -> None:
    port = free_port()
    options = ("--serve", str(port))
    with Run.python(shared, "server", SERVER, str(port), options=options) as run:
        lease = run.await_state("suspended")
        answer, took_s = intact(port)
        assert (answer, took_s < 10) == ("intact\n", True)
        with socket.create_connection(("127.0.0.1", port)) as line:
            # Open but unused: it stays, although its pool suspends idle leases at once.
            until(lambda: (found := run.lease()) is not None and found.busy, "the connection is seen")
            line.sendall(b"look\n")
            assert line.recv(100) == b"intact\n"
        assert run.await_state("suspended").suspends > lease.suspends
        run.process.send_signal(signal.SIGINT)
        status, complaint = run.end()
        assert (status, "KeyboardInterrupt" in complaint) == (-signal.SIGINT, True), complaint


# -- deaths ------------------------------------------------------------------------------------------------------------


def test_a_broker_that_is_killed_ends_no_command_and_the_next_connection_starts_another(shared: World) -> None:
    port = free_port()
    with (
        Run.python(shared, "served", SERVER, str(port), options=("--serve", str(port), "--fraction", "1/4")) as served,
        Run.python(shared, "read", READER, options=("--fraction", "1/4")) as read,
    ):
        served.await_state("suspended")
        read.await_state("suspended")
        shared.kill_broker()
        assert intact(port)[0] == "intact\n"
        assert read.ask() == "intact\n"
        assert (read.end()[0], read.lease()) == (0, None)


def test_the_command_ends_with_a_runner_that_is_killed_and_no_lease_stays(shared: World) -> None:
    with Run.python(shared, "orphan", READER) as run:
        lease = run.await_state("suspended")
        World.end(run.process.pid, signal.SIGKILL)
        run.await_no_lease()
        assert lease.pid is not None
        until(lambda: not Path(f"/proc/{lease.pid}").exists(), "the command ends")


def test_a_command_that_outlives_its_runner_is_brought_back_and_stays_until_it_ends(shared: World) -> None:
    program = READER.replace("import sys", "import signal, sys\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)", 1)
    with Run.python(shared, "outlives", program) as run:
        run.await_state("suspended")
        World.end(run.process.pid, signal.SIGKILL)
        lease = run.await_state("resident")
        assert lease.busy
        assert lease.pid is not None
        assert run.ask() == "intact\n"
        World.end(lease.pid, signal.SIGKILL)
        run.await_no_lease()


def test_an_evicted_kernel_says_by_whom_and_why(shared: World) -> None:
    with Run.python(shared, "evicted", READER) as run:
        lease = run.await_state("suspended")
        assert shared.command("evict", lease.lease_id, "--confirm", "--why", "maintenance").returncode == 0
        status, complaint = run.end()
    assert status == -signal.SIGTERM
    assert "ended this command at" in complaint
    assert "maintenance" in complaint


def test_one_past_its_cap_is_ended_where_the_pool_says_so_and_says_why(shared: World) -> None:
    with (
        pool(shared, "breach=kill", "idle_after=on-demand"),
        Run.python(shared, "greedy", PAST, options=("--fraction", "1/4")) as run,
    ):
        until(lambda: run.lease() is None or run.process.poll() is not None, "it is ended")
        status = run.process.wait(DEADLINE_S)
        assert run.process.stderr is not None
        complaint = run.process.stderr.read()
    assert status == -signal.SIGKILL
    assert "more than its cap of 256 MiB" in complaint


HERITAGE = """
import json, os, resource, signal
found = {}
for name in os.listdir("/proc/self/fd"):
    try:
        found[name] = os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError:
        pass  # of the list itself
kept = "SigBlk", "SigIgn", "Umask", "Cpus_allowed_list", "NoNewPrivs", "Seccomp"
status = [line for line in open("/proc/self/status").read().splitlines() if line.split(":")[0] in kept]
limits = [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]
print(json.dumps([found, status, limits, os.getpriority(os.PRIO_PROCESS, 0), os.getsid(0), os.getcwd()]))
"""
LEAVES = """
import os, resource, signal, sys
os.dup2(os.open(os.devnull, os.O_RDONLY), 4)
os.dup2(os.pipe()[0], 9)
for descriptor in (4, 9):
    os.set_inheritable(descriptor, True)
os.close(0)
os.nice(3)
os.umask(0o027)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
resource.setrlimit(resource.RLIMIT_STACK, (1 << 22, 1 << 23))
for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGCHLD):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2, signal.SIGTERM})
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_a_command_inherits_what_it_inherits_without_us(shared: World) -> None:
    """Descriptors with their numbers, ignored or blocked signals, niceness, processors, umask, limits."""
    command = [sys.executable, "-c", HERITAGE]
    found = []
    for words in (command, [sys.executable, "-m", "fractional_gpu.commands.main", "run", "--", *command]):
        with subprocess.Popen(
            [sys.executable, "-c", LEAVES, *words],
            env=shared.environment,
            stdout=subprocess.PIPE,
            start_new_session=True,
        ) as process:
            assert process.stdout is not None
            descriptors, *others = json.loads(process.stdout.read())
        assert process.returncode == 0
        others[3] -= process.pid  # the session's
        found.append([{name: re.sub(r"pipe:\[\d+\]", "a pipe", of) for name, of in descriptors.items()}, *others])
    assert found[0] == found[1]
    assert {"1", "2", "4", "9"} == found[0][0].keys()


# -- signals -----------------------------------------------------------------------------------------------------------


def test_signals_are_passed_on_and_the_second_that_asks_to_end_ends(shared: World) -> None:
    with Run.python(shared, "stubborn", STUBBORN) as run:
        run.process.send_signal(signal.SIGUSR1)
        assert run.line() == "told\n"
        run.process.send_signal(signal.SIGTERM)
        assert run.line() == "asked to end\n"
        run.process.send_signal(signal.SIGTERM)
        assert run.end()[0] == -signal.SIGKILL
        run.await_no_lease()


def test_the_runner_dies_of_the_signal_that_ended_its_command_and_dumps_no_core(shared: World, tmp_path: Path) -> None:
    number = signal.SIGSEGV
    kills = f"ulimit -c unlimited; cd {tmp_path}; {sys.executable} -m fractional_gpu.commands.main run -- sh -c 'kill -{number} $$'"
    done = subprocess.run(
        ["sh", "-c", f"{kills}; echo $?"], env=shared.environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == f"{128 + number}\n"
    with Run(shared, "killed", "--", "sh", "-c", f"kill -{number} $$") as run:
        assert run.end()[0] == -number


def test_a_signal_ends_the_wait_for_the_gpu(shared: World) -> None:
    with pool(shared, "idle_after=on-demand"), Run.python(shared, "before", READER) as holds:
        holds.pin()
        with Run(shared, "waits", "--fraction", "3/4", "--", "echo", "never") as run:
            until(lambda: (lease := run.lease()) is not None and lease.position == 1, "it waits")
            run.process.send_signal(signal.SIGTERM)
            assert run.end()[0] == -signal.SIGTERM
            assert run.line() == ""
            run.await_no_lease()


def test_a_terminals_ctrl_z_stops_it_fg_continues_it_and_ctrl_c_ends_a_loop_of_it(shared: World) -> None:
    # Here the system itself reacts to Ctrl-C; Python would notice an interrupt between its print and its read only after
    # the read.
    told = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
        "print('rea' + 'dy', flush=True); print('got', input(), flush=True)"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn about threads; the child becomes bash
        pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update({**shared.environment, "PS1": "$ "})
        os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])  # noqa: S606 - the test needs a shell
    seen = between = b""

    def expect(words: bytes) -> None:
        nonlocal seen, between
        while words not in seen:
            assert select.select([terminal], [], [], DEADLINE_S)[0], seen
            seen += os.read(terminal, 4096)
        between, _, seen = seen.partition(words)

    try:
        python = f'{sys.executable} -m fractional_gpu.commands.main run -- {sys.executable} -c "{told}"; echo end$?ed\n'
        os.write(terminal, python.encode())
        expect(b"ready")
        os.write(terminal, b"\x1a")
        expect(b"Stopped")
        os.write(terminal, b"fg\n")
        expect(b"fractional_gpu")
        os.write(terminal, b"hello\n")
        expect(b"got hello")
        os.write(terminal, python.encode())
        expect(b"ready\r\n")
        os.write(terminal, b"\x03")
        expect(b"$ ")  # as after any command that dies of that: the rest of its command line does not run
        os.write(terminal, b"echo end$?ed\n")
        expect(b"end130ed")
        os.write(terminal, f"for i in 1 2 3; do {python.strip()}; done; echo went o''n\n".encode())
        expect(b"ready\r\n")
        os.write(terminal, b"\x03")
        expect(b"$ ")
        assert b"went on" not in between
        os.write(terminal, b"echo end$?ed\n")
        expect(b"end130ed")
        os.write(terminal, b"exit\n")
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        ((), 2, "give a program after --"),
        (("--fraction", "5/4", "--", "true"), 2, "5/4"),
        (("--serve", "70000", "--", "true"), 2, "--serve must be a whole number from 1 to 65535, not '70000'"),
        (("--devices", "9", "--", "true"), 2, "--devices must be a whole number from 1 to 8, not '9'"),
        (("--devices", "2", "--fraction", "1/4", "--", "true"), 2, "leave --fraction out"),
        (("--priority", "high", "--", "true"), 2, "'high'"),
        (("--memory", "much", "--", "true"), 2, "'much'"),
        (("--wait", "long", "--", "true"), 2, "'long'"),
        (("--wait", "2h", "--", "true"), 2, "--wait must be at most 1 h, not 2h; leave it out"),
        (("--pool", "a/b", "--", "true"), 2, "'a/b' is not a valid pool name"),
        (("--pool", "nowhere", "--", "true"), 1, "there is no pool named 'nowhere'"),
        (("--memory", "2TiB", "--", "true"), 1, "2048 GiB of memory was requested"),
        (("--", "no-such-program"), 127, "no-such-program cannot be run: No such file or directory"),
        (("--", "/etc/passwd"), 126, "/etc/passwd cannot be run: Permission denied"),
    ],
)
def test_bad_input_gets_one_clear_error_and_takes_no_lease(
    shared: World, words: tuple[str, ...], status: int, says: str
) -> None:
    if shared.broker_pid() is None:
        shared.start_broker()
    before = {lease.lease_id for lease in shared.status().leases}  # processes of another test may still be ending
    done = shared.command("run", *words)
    assert (done.returncode, says in done.stderr, done.stderr.count("\n")) == (status, True, 1), done.stderr
    assert {lease.lease_id for lease in shared.status().leases} <= before
