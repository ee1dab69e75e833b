"""How kernels share a device is one word of few; what does not go together is refused at loading."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fractional_gpu.config import POOL_KEYS, ConfigError, load
from fractional_gpu.core.model import Breach, Sharing, Strangers

Write = Callable[..., Path]


def policy(write: Write, pool: object) -> dict[str, object]:
    (settings,) = load(write(f"c.GPUBroker.pools = {{'default': {pool!r}}}")).pools
    return {name: getattr(settings, name) for name in POOL_KEYS}


def test_the_words_are_what_they_mean(write: Write) -> None:
    found = policy(
        write, {"sharing": "mps", "breach": "kill", "strangers": "refuse", "hami_library": "/opt/libvgpu.so"}
    )
    assert (found["sharing"], found["breach"], found["strangers"]) == (Sharing.MPS, Breach.KILL, Strangers.REFUSE)
    assert found["hami_library"] == "/opt/libvgpu.so"


def test_a_mig_pool_offers_whole_instances(write: Write) -> None:
    assert policy(write, {"sharing": "mig"})["fractions"] == (1000,)
    assert policy(write, {"sharing": "mig", "fractions": ["1"]})["fractions"] == (1000,)


@pytest.mark.parametrize(
    ("pool", "says"),
    [
        ({"sharing": "vgpu"}, "allowed: 'time-slice', 'mps' or 'mig'"),
        ({"sharing": ["mps"]}, "allowed: 'time-slice'"),
        ({"breach": True}, "allowed: 'warn', 'suspend' or 'kill'"),
        ({"strangers": "kill"}, "allowed: 'show' or 'refuse'"),
        ({"suspend_unseen": 1}, "allowed: True or False"),
        ({"hami_library": "libvgpu.so"}, "the absolute path of a library"),
        ({"hami_library": "/a:/b"}, "without spaces and colons"),
        ({"sharing": "mig", "fractions": ["1/2", "1"]}, "a kernel has a whole instance"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused_by_name(write: Write, pool: object, says: str) -> None:
    with pytest.raises(ConfigError, match="default") as refused:
        policy(write, pool)
    assert says in str(refused.value)
