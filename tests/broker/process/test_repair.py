import os
from contextlib import closing
from pathlib import Path

from fractional_gpu.broker.process import app
from fractional_gpu.broker.process.repair import BrokerLock
from fractional_gpu.client.http import claim_address
from fractional_gpu.host.claims import NameClaim


def test_a_broker_that_meets_one_with_another_filesystem_says_so(tmp_path: Path) -> None:
    socket = str(tmp_path / "broker.sock")
    lock = BrokerLock(socket)
    other = NameClaim.take(claim_address(socket))
    assert isinstance(other, NameClaim)
    with other, closing(lock):
        said = app._take_turn(lock, socket, None, patience_s=-1)
    assert isinstance(said, str)
    assert said.startswith(f"process {os.getpid()} already serves {socket} in another filesystem")
