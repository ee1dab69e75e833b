"""The same events give the same effects in another process and with another hash seed."""

import hashlib
import os
import pickle
import subprocess
import sys

import pytest

from fractional_gpu.core.arbiter import Arbiter
from tests.core.simulation import simulate
from tests.support.paths import PYTHONPATH

pytestmark = pytest.mark.promise("replay")

_REPLAY = """
import hashlib, pickle, sys
from fractional_gpu.core.arbiter import Arbiter
arbiter = Arbiter()
effects = [effect for event in pickle.load(sys.stdin.buffer) for effect in arbiter.handle(event)]
print(hashlib.sha256(repr(effects).encode()).hexdigest())
"""


def _digest_elsewhere(recorded: bytes, hash_seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(
        [sys.executable, "-c", _REPLAY], input=recorded, env=environment, capture_output=True, check=True, timeout=60
    )
    return done.stdout.decode().strip()


def test_a_recorded_log_replays_to_the_same_effects_in_another_process() -> None:
    world = simulate(5)
    expected = hashlib.sha256(repr(world.made).encode()).hexdigest()
    recorded = pickle.dumps(world.log)
    assert {_digest_elsewhere(recorded, hash_seed) for hash_seed in ("0", "1", "4711")} == {expected}


def test_checks_change_no_decision() -> None:
    world = simulate(6)
    unchecked = Arbiter(check=False)
    assert [effect for event in world.log for effect in unchecked.handle(event)] == world.made


def test_reflecting_between_events_changes_no_decision() -> None:
    world = simulate(8)
    reflecting, made = Arbiter(), []
    for event in world.log:
        made += reflecting.handle(event)
        reflecting.run_deferred_work()
    assert made == world.made
