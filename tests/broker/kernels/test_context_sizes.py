"""Estimated context sizes: an upper bound for each user, which one user's kernels do not raise for all others."""

from hypothesis import given
from hypothesis import strategies as st

from fractional_gpu.broker.kernels.context_sizes import FLOOR_MIB, KERNELS, MOST_MIB, ContextSize, ContextSizes

CAP = 20 * 1024
ME, OTHER, NEW = 1, 2, 3


def learnt(*figures: tuple[int, int], device: str = "G") -> ContextSizes:
    """Return sizes learnt from one kernel each, given as (uid, MiB)."""
    sizes = ContextSizes()
    for number, (uid, mib) in enumerate(figures):
        sizes.saw(device, f"kernel {number}", ContextSize(uid, mib), CAP)
    return sizes


def test_without_a_figure_and_for_smaller_ones_it_is_the_floor() -> None:
    assert ContextSizes().estimate_mib("G", ME) == FLOOR_MIB
    assert learnt((ME, 300)).estimate_mib("G", ME) == FLOOR_MIB
    assert learnt((ME, 900)).estimate_mib("another device", ME) == FLOOR_MIB


def test_the_first_kernel_teaches_all() -> None:
    sizes = learnt((ME, 850))
    assert (sizes.estimate_mib("G", ME), sizes.estimate_mib("G", NEW)) == (864, 864)


def test_one_user_s_odd_kernels_count_for_that_user_alone_once_there_are_others() -> None:
    sizes = learnt(*[(ME, 4000)] * 3, *[(OTHER, 700)] * 9)
    assert sizes.estimate_mib("G", ME) == 4000
    assert sizes.estimate_mib("G", OTHER) == sizes.estimate_mib("G", NEW) == 704


def test_what_cannot_be_a_context_is_left_out() -> None:
    sizes = ContextSizes()
    assert not sizes.saw("G", "k", ContextSize(ME, MOST_MIB + 1), CAP)
    assert not sizes.saw("G", "k", ContextSize(ME, -1), CAP)
    assert not sizes.saw("G", "k", ContextSize(ME, 800), 1024)
    assert sizes == ContextSizes()
    assert sizes.saw("G", "k", ContextSize(ME, 760), 1024)


def test_a_kernel_counts_once_with_its_largest_figure() -> None:
    sizes = ContextSizes()
    changes = [sizes.saw("G", "kernel", ContextSize(ME, mib), CAP) for mib in (900, 600, 910, 960)]
    assert changes == [True, False, False, True]
    assert sizes.seen == {"G": {"kernel": ContextSize(ME, 960)}}


def test_old_kernels_and_old_devices_are_forgotten() -> None:
    sizes = learnt((ME, 3000), *[(ME, 600)] * KERNELS)
    assert sizes.estimate_mib("G", ME) == 608
    for number in range(200):
        sizes.saw(f"device {number}", "kernel", ContextSize(ME, 600), CAP)
    assert len(sizes.seen) == 64
    assert sizes.estimate_mib("device 199", ME) == 608


SEEN = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3), st.integers(0, MOST_MIB)), min_size=1, max_size=100)


@given(seen=SEEN)
def test_an_estimate_lies_between_the_floor_and_the_largest_figure_and_covers_most_kernels(
    seen: list[tuple[int, int, int]],
) -> None:
    sizes, last = ContextSizes(), dict[int, ContextSize]()
    for kernel, uid, mib in seen:
        sizes.saw("G", str(kernel), ContextSize(uid, mib), 4 * MOST_MIB)
        earlier = last.pop(kernel, ContextSize(uid, mib))
        last[kernel] = ContextSize(uid, max(mib, earlier.mib))
        last = dict(list(last.items())[-KERNELS:])
    for uid in range(5):
        estimate = sizes.estimate_mib("G", uid)
        assert FLOOR_MIB <= estimate <= max(FLOOR_MIB, max(one.mib for one in last.values()) + 31)
        assert all(one.mib <= estimate for one in last.values() if one.uid == uid)
        assert 4 * sum(one.mib <= estimate for one in last.values()) >= 3 * len(last)


@given(seen=SEEN, odd=st.lists(st.integers(0, MOST_MIB), max_size=4))
def test_a_quarter_of_all_kernels_cannot_raise_the_estimate_of_other_users(
    seen: list[tuple[int, int, int]], odd: list[int]
) -> None:
    figures = [(uid, mib) for _, uid, mib in seen][: KERNELS - len(odd)]
    added = odd[: len(figures) // 3]
    sizes = learnt(*figures, *[(99, mib) for mib in added])
    most = max([FLOOR_MIB, *(mib for _, mib in figures)])
    assert sizes.estimate_mib("G", NEW + 100) <= -(-most // 32) * 32
