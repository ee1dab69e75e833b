"""Leases to keep, and a fresh place to keep them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fractional_gpu.core.model import LeaseSpec, LeaseState
from fractional_gpu.host.process import ProcessIdentity
from fractional_gpu.ledger.ledger import Ledger
from fractional_gpu.ledger.records import LeaseRecord
from tests.support.records import a_record, changed

_LEASE = a_record(
    spec=LeaseSpec(
        lease_id="a", pool="default", owner="ada", fraction_milli=250, reserve_mib=20_480, label="Notizbuch é"
    ),
    state=LeaseState.RESIDENT,
    generation=7,
    saved_mib=0,
    uid=1000,
    kernel_id="k-1",
    token_sha256="ab" * 32,
    boot_id="boot-1",
    pid=4321,
    start_time=99_999_999_999,
    connection='{"key": "secret"}',
    language="python",
    ipykernel=True,
    created_ms=1_750_000_000_000,
    suspends=3,
    resumes=2,
    device_ids=("GPU-1", "GPU-3"),
    home_ids=("GPU-2", "GPU-4"),
    pinned_until_ms=1_750_000_900_000,
    members=(ProcessIdentity("boot-1", 4322, 99), ProcessIdentity("boot-1", 4323, 100)),
    released=True,
    server=ProcessIdentity("boot-1", 4000, 77),
    token_file="/run/user/1000/lease-1f.token",  # noqa: S106 - a path
    taken_over=True,
    had_process=True,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "ledger.db"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    with Ledger.open(path) as ledger:
        yield ledger


@pytest.fixture
def make_lease() -> Callable[..., LeaseRecord]:
    def make(lease_id: str = "a", **changes: Any) -> LeaseRecord:  # noqa: ANN401 -- any field of the record
        return changed(_LEASE, spec=replace(_LEASE.spec, lease_id=lease_id), **changes)

    return make
