"""A fake broker on a private socket."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fractional_gpu.client.client import BrokerClient
from tests.support.fake_broker import FakeBroker


@pytest.fixture
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeBroker]:
    socket = tmp_path_factory.mktemp("s") / "b.sock"
    with FakeBroker(str(socket)) as broker:
        yield broker


@pytest.fixture
def client(broker: FakeBroker) -> Iterator[BrokerClient]:
    with BrokerClient(broker.path, token="token-1") as client:  # noqa: S106 - the fake's first lease
        yield client


@pytest.fixture
def short_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s")
