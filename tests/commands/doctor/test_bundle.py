"""The support bundle shows what helps, and no secret."""

import json
import os
import secrets
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from fractional_gpu.commands.doctor.report import clean
from fractional_gpu.protocol.messages import LeaseRequest
from tests.support.world import World, new_world


def test_what_looks_like_a_secret_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("LOGNAME", "ann")
    token = secrets.token_urlsafe(32)
    text = clean(
        f"ann in /home/ann/work: Authorization: Bearer abc, ?token=def {token} {'a0' * 32} lease 0123abcd annual"
    )
    assert (
        text
        == "USER in ~/work: Authorization: Bearer [removed] ?token=[removed] [removed] [digest] lease 0123abcd annual"
    )


def bundle(world: World, path: Path) -> tuple[int, dict[str, str], str]:
    """Write one; return the exit code, the files in it, and what was said."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "fractional_gpu.commands.main", "doctor", "--no-try", "--bundle", str(path)],
        env=world.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    with tarfile.open(path) as archive:
        files = {
            Path(entry.name).name: content.read().decode()
            for entry in archive.getmembers()
            if (content := archive.extractfile(entry)) is not None
        }
    return done.returncode, files, done.stderr


def test_a_bundle_holds_findings_status_logs_and_versions(tmp_path: Path) -> None:
    with new_world() as world:
        world.start_broker()
        with world.client() as client:
            reply = client.create_lease(LeaseRequest(fraction_milli=250, label="secret plans.ipynb"))
        log = Path(world.socket).with_name("broker.log")
        log.write_text(log.read_text() + f"a token that must never be here: {reply.token}\n")
        path = tmp_path / "bundle.tar.gz"
        _, files, said = bundle(world, path)
        with world.client() as client:
            client.release(reply.lease_id)
    assert path.stat().st_mode & 0o777 == 0o600
    assert "Read it before you send it" in said
    assert set(files) >= {"doctor.json", "versions.json", "status.json", "broker.log"}
    assert json.loads(files["doctor.json"])["findings"]
    (lease,) = json.loads(files["status.json"])["leases"]
    assert (lease["lease"]["spec"]["lease_id"], lease["lease"]["spec"]["label"]) == (reply.lease_id, "[removed]")
    everything = "\n".join(files.values())
    assert "secret plans" not in everything
    assert reply.token not in everything
    assert str(Path.home()) + os.sep not in everything
