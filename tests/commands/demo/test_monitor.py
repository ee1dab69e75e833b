"""What the demonstration's watcher makes of pictures of leases."""

import pytest

from fractional_gpu.commands.demo.demo import LeaseTracker
from tests.commands.pictures import a_lease
from tests.support.statuses import changed


def test_changes_are_told_once_and_strangers_never() -> None:
    sampler = LeaseTracker({"kernel-1": "tenant-a"})
    stranger = a_lease(kernel_id="somebody-else")
    assert sampler.feed(10.0, [a_lease(age_ms=0), stranger]) == []
    assert sampler.feed(11.0, [a_lease(state="suspending", age_ms=500), stranger]) == ["tenant-a: being suspended"]
    assert sampler.feed(11.1, [a_lease(state="suspending", age_ms=600)]) == []
    told = sampler.feed(14.0, [a_lease(state="suspended", age_ms=1000, saved_mib=576)])
    assert told == ["tenant-a: suspended, 576 MiB now in host memory"]


def test_the_time_of_a_move_is_exact_although_pictures_are_late() -> None:
    sampler = LeaseTracker({"kernel-1": "tenant-a"})
    sampler.feed(10.0, [a_lease(age_ms=0)])
    sampler.feed(11.0, [a_lease(state="suspending", age_ms=500)])  # began at 10.5
    sampler.feed(14.0, [a_lease(state="suspended", age_ms=1000)])  # ended at 13.0
    sampler.feed(20.0, [a_lease(state="resuming", age_ms=0)])
    assert sampler.moved_s("kernel-1") == pytest.approx(2.5)
    sampler.feed(21.0, [a_lease(age_ms=250)])  # ended at 20.75
    assert sampler.moved_s("kernel-1") == pytest.approx(3.25)
    assert sampler.moved_s("unknown") == 0.0


def test_what_happened_first_is_told_first() -> None:
    sampler = LeaseTracker({"kernel-1": "tenant-a", "kernel-2": "tenant-b"})
    one, two = a_lease(state="suspending"), a_lease(lease_id="9" * 12, kernel_id="kernel-2", state="suspended")
    sampler.feed(10.0, [two, one])
    later = [
        changed(two, state="resuming", age_ms=20),
        changed(one, state="suspended", age_ms=30, saved_mib=1024),
    ]
    assert sampler.feed(11.0, later) == [
        "tenant-a: suspended, 1 GiB now in host memory",
        "tenant-b: being resumed",
    ]
