"""What the demonstration's watcher concludes from pictures of leases."""

from fractional_gpu.commands.demo.demo import LeaseTracker
from tests.commands.pictures import a_lease


def test_changes_are_told_once_and_strangers_never() -> None:
    sampler = LeaseTracker({"kernel-1": "tenant-a"})
    stranger = a_lease(kernel_id="somebody-else")
    assert sampler.feed(10.0, [a_lease(age_ms=0), stranger]) == []
    assert sampler.feed(11.0, [a_lease(state="suspending", age_ms=500), stranger]) == ["tenant-a: being suspended"]
    assert sampler.feed(11.1, [a_lease(state="suspending", age_ms=600)]) == []
    told = sampler.feed(14.0, [a_lease(state="suspended", age_ms=1000, saved_mib=576)])
    assert told == ["tenant-a: suspended, 576 MiB now in host memory"]
