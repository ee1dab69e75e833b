"""A lease's token appears only in its file, and another user's text never becomes a line of the log."""

import dataclasses
import io
import json
import logging
import os
import re
import socket
import tarfile
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import msgspec
import pytest

from fractional_gpu.broker.kernels import iopub, request_validation
from fractional_gpu.broker.process.logs import _PrivateLog
from fractional_gpu.client import seat
from fractional_gpu.commands.main import main
from fractional_gpu.jupyter import kernel_lease
from fractional_gpu.ledger import records
from fractional_gpu.protocol import messages, seats
from fractional_gpu.protocol.messages import LeaseRequest
from tests.support.stories import CHECK, fill
from tests.support.victims import anybody, brokers, workers
from tests.support.world import Server, World, new_world

pytestmark = pytest.mark.promise("tokens")

VERBOSE = """
import os
from IPython.core.ultratb import VerboseTB
from fractional_gpu.client.client import BrokerClient
client = BrokerClient(os.environ["JUPYTER_GPU_SOCKET"], token=open(os.environ["JUPYTER_GPU_TOKEN_FILE"]).read())
lease = client.lease(os.environ["JUPYTER_GPU_LEASE"])
try:
    client.lease("nobody")
except Exception as error:
    print(VerboseTB(theme_name="nocolor").text(type(error), error, error.__traceback__))
"""
SECRETS = {"token", "key", "curve", "connection"}
SECRET_VARIABLES = (
    "JUPYTER_TOKEN",
    "JUPYTER_GPU_TOKEN_FILE",
    "JUPYTERHUB_API_TOKEN",
    "PYTHON_KEYRING_PASSWORD",
    "XDG_SECRET",
)


def run(world: World, *words: str) -> str:
    """Return everything that a command prints."""
    printed = io.StringIO()
    with patch.dict(os.environ, world.environment, clear=True), redirect_stdout(printed), redirect_stderr(printed):
        main(list(words))
    return printed.getvalue()


def processes(world: World) -> list[Path]:
    """Return the folders in /proc of all processes that belong to the world."""
    return [Path(f"/proc/{pid}") for pid in {*anybody(world), *brokers(world), *workers(world)}]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """With a broker in whose environment there are secrets."""
    with new_world() as made:
        made.environment |= dict.fromkeys(SECRET_VARIABLES, "hunter2") | {"XDG_DATA_HOME": "/data"}
        made.start_broker()
        yield made


@pytest.fixture
def told() -> dict[str, str]:
    """Return everything readable that a story of two kernels leaves, by place, with the tokens under `tokens`."""
    with new_world() as world, Server(world) as server:
        (name,) = world.install(750)
        first, second = server.start(name), server.start(name)
        first.must(fill(1))
        second.must(fill(2))
        first.must("%gpu explain")
        assert first.must(CHECK).text == "intact\n"
        lease_id = world.lease(first.kernel_id).lease_id
        texts = {
            "tokens": "\n".join(path.read_text() for path in (world.folder / "run").rglob("*.token")),
            "shown in the notebook": json.dumps(
                [first.run(line).data for line in ("%gpu", "%gpu top", "%gpu explain")]
            ),
            "the kernels' list": json.dumps(server.request("GET", "api/kernels")),
        }
        bundle = world.folder / "bundle.tar.gz"
        doctor = ["doctor", "--bundle", str(bundle)]
        for words in (["status", "--json"], ["status"], ["explain", lease_id], doctor):
            texts[f"jupyter gpu {' '.join(words)}"] = run(world, *words)
        with tarfile.open(bundle) as archive:
            for member in archive:
                file = archive.extractfile(member)
                assert file is not None
                texts[f"bundle: {member.name}"] = file.read().decode()
        run(world, "suspend", "no-such-lease")
        texts["a verbose traceback"] = first.run(VERBOSE).text
        texts["keys"] = "\n".join(json.loads(path.read_text())["key"] for path in world.folder.rglob("kernel-*.json"))
        for folder in processes(world):
            for what in ("cmdline", "environ"):
                texts[f"{folder / what}"] = (folder / what).read_bytes().decode(errors="replace")
        world.end(brokers(world)[0], 15)
        records = [path for path in world.folder.rglob("*.json") if path.parent.name.endswith(".leases-simulated")]
        assert len(records) == 2
        assert {path.stat().st_mode & 0o777 for path in records} == {0o600}
        assert {path.parent.stat().st_mode & 0o777 for path in records} == {0o700}
        for path in world.folder.rglob("*"):
            if path.is_file() and path.suffix != ".token":
                texts[str(path)] = path.read_bytes().decode(errors="replace")
        world.start_broker()
        return texts


def test_a_token_is_nowhere_but_in_its_file(told: dict[str, str]) -> None:
    tokens, keys = told.pop("tokens").split(), told.pop("keys").split()
    assert (len(tokens), len(keys)) == (2, 2)
    assert any(name.startswith("bundle: ") and "status.json" in name for name in told)
    assert "NotFoundError" in told["a verbose traceback"]
    assert any(name.endswith("broker.log") for name in told)
    assert any(name.endswith("server.err") for name in told)
    assert any(".sqlite" in name for name in told)
    assert any(name.startswith("/proc/") and "JUPYTER_GPU_TOKEN_FILE" in text for name, text in told.items())
    leaks = [name for name, text in told.items() for token in tokens if token in text]
    assert leaks == []
    # A kernel's signing key is in its connection file, and for the broker's next run in the ledger and the lease's second
    # record, which only their owner can read.
    allowed = re.compile(r"/kernel-[^/]*\.json$|\.sqlite(-wal|-shm)?$|\.leases-simulated/[0-9a-f]+\.json$")
    assert [name for name, text in told.items() for key in keys if key in text and not allowed.search(name)] == []


def test_how_to_start_the_broker_again_is_kept_without_a_secret_of_its_environment(world: World) -> None:
    kept = [Path(world.socket).with_name("broker.json"), world.state / "broker.json"]
    commands = [json.loads(path.read_text()) for path in kept]
    for environment in (one["env"] for one in commands):
        assert "hunter2" not in json.dumps(environment)
        assert environment["XDG_DATA_HOME"] == "/data"
        assert environment["JUPYTER_GPU_SIMULATE"] == world.simulate


@pytest.mark.parametrize(
    "module", [messages, seats, seat, request_validation, iopub, records, kernel_lease], ids=lambda one: one.__name__
)
def test_nothing_secret_is_shown_when_an_object_is(module: ModuleType) -> None:
    """Tracebacks with variables, logs and debuggers show the `repr`."""
    for kind in classes_of(module):
        if dataclasses.is_dataclass(kind):
            assert [field.name for field in dataclasses.fields(kind) if field.name in SECRETS and field.repr] == []
        elif issubclass(kind, msgspec.Struct):
            shown = repr(kind(**dict.fromkeys(kind.__struct_fields__, "")))
            assert SECRETS.isdisjoint(re.findall(r"(\w+)=", shown)), shown


def classes_of(module: ModuleType) -> list[type]:
    return [kind for kind in vars(module).values() if isinstance(kind, type)]


def fields_of(kind: type) -> tuple[str, ...]:
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    return kind.__struct_fields__ if issubclass(kind, msgspec.Struct) else ()


def test_what_has_secrets_is_known() -> None:
    modules = (messages, seats, seat, request_validation, iopub, records, kernel_lease)
    classes = {kind for module in modules for kind in classes_of(module)}
    named = {f"{kind.__name__}.{field}" for kind in classes for field in fields_of(kind) if field in SECRETS}
    expected = {
        "LeaseReply.token",
        "SeatProgress.token",
        "Seat.token",
        "Peer.token",
        "KernelLease.token",
        "AttachRequest.connection",
    }
    assert named >= expected | {"LeaseRecord.connection", "Connection.key", "Connection.curve"}


def test_bytes_of_strangers_make_no_lines_in_the_log(world: World) -> None:
    evil = b"\xc2\x85 2026-01-01 00:00:00,000 INFO lease 87654321: granted \xe2\x80\xae\xff\x1b[31m"
    target = evil.replace(b" ", b"%20").replace(b"\x1b", b"%1b")
    requests = [
        b"GET /" + target + b" HTTP/1.1\r\nHost: b\r\n\r\n",
        b"GET /v1/ping HTTP/1.1\r\nHost: " + evil + b"\r\nAuthorization: " + evil + b"\r\n\r\n",
        b"GET /v1/ping HTTP/1.1\r\nHost: b\r\nAuthorization: Basic\xff\xe2\x80\xae\r\n\r\n",
        evil + b" / HTTP/1.1\r\n\r\n",
        b'POST /v1/leases HTTP/1.1\r\nHost: b\r\nContent-Length: 43\r\n\r\n{"evil\\n\\u001b[31m\\u202e87654321\\u0085": 1 }',
    ]
    for request in requests:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(30)
            line.connect(world.socket)
            line.sendall(request)
            line.shutdown(socket.SHUT_WR)
            while line.recv(65536):
                pass
    with world.client() as client:
        client.ping()
    log = Path(world.socket).with_name("broker.log").read_text()
    assert "refused" in log
    assert all(line.isprintable() for line in log.splitlines())
    assert not re.search(r"^2026-01-01 00:00:00", log, flags=re.MULTILINE)


EVIL = "evil\n2026-01-01 00:00:00,000 INFO lease 12345678: granted\r\x1b[31mred\x1b[0m\u202e"


def test_text_of_strangers_makes_no_lines_in_the_log(world: World) -> None:
    with world.client() as client:
        reply = client.create_lease(LeaseRequest(fraction_milli=250, label=EVIL, kernel_id=EVIL))
        shown = client.lease(reply.lease_id)
        client.release(reply.lease_id)
    log = Path(world.socket).with_name("broker.log").read_text()
    assert reply.lease_id[:8] in log
    assert "12345678" not in re.sub(r"^.*evil.*$", "", log, flags=re.MULTILINE)
    assert all(line.isprintable() for line in log.splitlines())
    assert shown.spec.label.isprintable()
    assert shown.kernel_id.isprintable()


def test_a_restarted_log_is_private_too(tmp_path: Path) -> None:
    path = tmp_path / "broker.log"
    path.write_text("of an earlier broker\n")
    path.chmod(0o644)
    handler = _PrivateLog(path, maxBytes=100, backupCount=2)
    for number in range(9):
        handler.emit(logging.LogRecord("x", logging.INFO, "", 0, f"line {number}: \ud800 " + "x" * 40, None, None))
    handler.close()
    assert {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {
        "broker.log": 0o600,
        "broker.log.1": 0o600,
        "broker.log.2": 0o600,
    }
    link = tmp_path / "link.log"
    link.symlink_to(path)
    with pytest.raises(OSError, match="symbolic link"):
        _PrivateLog(link)


def test_what_lies_about_is_for_its_owner_only(world: World) -> None:
    with world.client() as client:
        client.create_lease(LeaseRequest(fraction_milli=250))
    run_folder = Path(world.socket).parent
    open_to_others = [
        path
        for path in [run_folder, *run_folder.iterdir()]
        if path.lstat().st_mode & 0o077 and path.lstat().st_uid == os.getuid()
    ]
    assert open_to_others == []
