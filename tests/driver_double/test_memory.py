"""The double's memory calls beside plain allocations: virtual memory, host memory, streams and events."""

import pytest

from tests.driver_double.double import DriverDouble
from tests.driver_double.remote import Remote
from tests.gpu_sim.kernels import KernelProcess

# A little of what a framework has for virtual memory: each function returns CUDA's result.
VIRTUAL = """!
import ctypes
cuda.memory_info()
lib, u64, size_t = cuda.driver(), ctypes.c_uint64, ctypes.c_size_t
MIB2 = 2 << 20

class Prop(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", ctypes.c_int), ("device", ctypes.c_int),
                ("more", ctypes.c_char * 64)]

class Access(ctypes.Structure):
    _fields_ = [("location", ctypes.c_int), ("device", ctypes.c_int), ("flags", ctypes.c_int)]

at, other, handle, granularity = u64(), u64(), u64(), size_t()
prop, access = Prop(1, 0, 1, 0), Access(1, 0, 3)

def reserve(out, size, wanted=0):
    return lib.cuMemAddressReserve(ctypes.byref(out), size_t(size), size_t(0), u64(wanted), u64(0))

def create(size):
    return lib.cuMemCreate(ctypes.byref(handle), size_t(size), ctypes.byref(prop), u64(0))

def put(where, size, offset=0):
    return lib.cuMemMap(u64(where), size_t(size), size_t(offset), handle, u64(0))

def open_to(where, size):
    return lib.cuMemSetAccess(u64(where), size_t(size), ctypes.byref(access), size_t(1))

def unmap(where, size):
    return lib.cuMemUnmap(u64(where), size_t(size))

def write(where, data):
    return lib.cuMemcpyHtoD_v2(u64(where), data, size_t(len(data)))

def read(where, size):
    host = ctypes.create_string_buffer(size)
    assert lib.cuMemcpyDtoH_v2(host, u64(where), size_t(size)) == 0
    return host.raw
"""


@pytest.fixture
def virtual(kernel: KernelProcess) -> KernelProcess:
    """A process with 4 MiB of device memory mapped at the address `at`."""
    kernel.run(VIRTUAL)
    assert kernel.run("[reserve(at, 2 * MIB2), create(2 * MIB2), put(at.value, 2 * MIB2)]") == [0, 0, 0]
    return kernel


def test_memory_is_mapped_used_and_given_back(double: DriverDouble, virtual: KernelProcess) -> None:
    assert virtual.run("write(at.value, b'x')") == 1, "no access yet"
    assert virtual.run("open_to(at.value, 2 * MIB2)") == 0
    assert virtual.run("write(at.value + 100, b'hello')") == 0
    assert virtual.run("read(at.value + 99, 7).decode()") == "\0hello\0"
    device = double.devices[0].device_id
    process = double.process(virtual.pid)
    assert process is not None
    assert process.mib == {device: 32 + 4}
    assert virtual.run("lib.cuMemAddressFree(at, size_t(2 * MIB2))") == 1, "it is mapped"
    assert virtual.run("lib.cuMemRelease(handle)") == 0
    assert virtual.run("read(at.value + 100, 5).decode()") == "hello", "what is mapped stays"
    assert virtual.run("unmap(at.value, 2 * MIB2)") == 0
    process = double.process(virtual.pid)
    assert process is not None
    assert process.mib == {device: 32}
    assert virtual.run("lib.cuMemAddressFree(at, size_t(2 * MIB2))") == 0


def test_memory_that_was_unmapped_is_mapped_again_at_the_same_address(virtual: KernelProcess) -> None:
    virtual.run("open_to(at.value, 2 * MIB2)")
    virtual.run("write(at.value + MIB2, b'again')")
    assert virtual.run("unmap(at.value, 2 * MIB2)") == 0
    assert virtual.run("write(at.value, b'x')") == 1
    assert virtual.run("put(at.value, 2 * MIB2)") == 0
    virtual.run("open_to(at.value, 2 * MIB2)")
    assert virtual.run("read(at.value + MIB2, 5).decode()") == "again"


def test_one_piece_of_memory_may_be_mapped_twice(virtual: KernelProcess) -> None:
    assert virtual.run("[reserve(other, 2 * MIB2), put(other.value, 2 * MIB2)]") == [0, 0]
    virtual.run("(open_to(at.value, 2 * MIB2), open_to(other.value, 2 * MIB2))")
    virtual.run("write(at.value, b'one')")
    assert virtual.run("read(other.value, 3).decode()") == "one"


def test_addresses_can_be_wished_for(virtual: KernelProcess) -> None:
    assert virtual.run("reserve(other, 2 * MIB2, 0x500000000000)") == 0
    assert virtual.run("other.value") == 0x500000000000
    assert virtual.run("reserve(other, 2 * MIB2, at.value)") == 0, "taken: it lies elsewhere"
    assert virtual.run("other.value != at.value")


@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("reserve(other, 1000)", 1),
        ("create(1000)", 1),
        ("create(2 << 30)", 2),
        ("put(at.value, 2 * MIB2)", 1),  # it is mapped already
        ("put(0x1000, MIB2)", 1),
        ("put(other.value, 2 * MIB2, MIB2)", 1),  # more than there is
        ("unmap(at.value, MIB2)", 1),  # half of a mapping
        ("open_to(other.value, MIB2)", 1),
        ("lib.cuMemRelease(u64(5))", 1),
    ],
)
def test_what_makes_no_sense_is_refused(virtual: KernelProcess, call: str, number: int) -> None:
    assert virtual.run("reserve(other, 2 * MIB2)") == 0
    assert virtual.run(call) == number


def test_mapped_memory_survives_a_checkpoint_at_its_address(
    double: DriverDouble, remote: Remote, virtual: KernelProcess
) -> None:
    first, second = (device.device_id for device in double.devices)
    virtual.run("open_to(at.value, 2 * MIB2)")
    virtual.run("write(at.value + 3 * (1 << 20), b'kept')")
    remote.checkpointer.lock(virtual.pid, 1000)
    remote.checkpointer.checkpoint(virtual.pid)
    assert remote.monitor.use(first).used_mib == 0
    remote.checkpointer.restore(virtual.pid, {first: second})
    remote.checkpointer.unlock(virtual.pid)
    assert virtual.run("read(at.value + 3 * (1 << 20), 4).decode()") == "kept"


def test_what_is_unmapped_is_no_part_of_a_checkpoint(
    double: DriverDouble, remote: Remote, virtual: KernelProcess
) -> None:
    """The order of an offload: copied out, unmapped, released; what is left is checkpointed, and all is mapped again later."""
    virtual.run("open_to(at.value, 2 * MIB2)")
    virtual.run("write(at.value, bytes(range(256)) * (2 * MIB2 // 256))")
    virtual.run("!arena = ctypes.create_string_buffer(read(at.value, 2 * MIB2), 2 * MIB2)")
    virtual.run("(unmap(at.value, 2 * MIB2), lib.cuMemRelease(handle))")
    remote.checkpointer.lock(virtual.pid, 1000)
    remote.checkpointer.checkpoint(virtual.pid)
    process = double.process(virtual.pid)
    assert process is not None
    assert process.saved_mib == 0
    remote.checkpointer.restore(virtual.pid)
    remote.checkpointer.unlock(virtual.pid)
    assert virtual.run("[create(2 * MIB2), put(at.value, 2 * MIB2), open_to(at.value, 2 * MIB2)]") == [0, 0, 0]
    virtual.run("write(at.value, arena.raw)")
    assert virtual.run("read(at.value, 2 * MIB2) == bytes(range(256)) * (2 * MIB2 // 256)")


# ---- host memory, streams, events ------------------------------------------------------------------------------------------

HOST = "!import ctypes; cuda.memory_info(); lib = cuda.driver(); p = ctypes.c_void_p(); x = cuda.allocate(1 << 20)"


def test_pinned_and_registered_memory_is_copied_from(kernel: KernelProcess) -> None:
    kernel.run(HOST)
    assert kernel.run("lib.cuMemHostAlloc(ctypes.byref(p), ctypes.c_size_t(4096), 0)") == 0
    kernel.run("!ctypes.memmove(p.value, b'pinned', 6)")
    assert kernel.run("lib.cuMemcpyHtoDAsync_v2(x.pointer, p, ctypes.c_size_t(6), None)") == 0
    assert kernel.run("x.read(6).decode()") == "pinned"
    assert kernel.run("lib.cuMemFreeHost(p)") == 0
    kernel.run("!mine = ctypes.create_string_buffer(b'registered', 4096); r = ctypes.addressof(mine)")
    register = "lib.cuMemHostRegister_v2(ctypes.c_void_p(r), ctypes.c_size_t(4096), 0)"
    assert [kernel.run(register), kernel.run(register)] == [0, 712]
    assert kernel.run("lib.cuMemcpy(x.pointer, ctypes.c_uint64(r), ctypes.c_size_t(10))") == 0
    assert kernel.run("x.read(10).decode()") == "registered"
    unregister = "lib.cuMemHostUnregister(ctypes.c_void_p(r))"
    assert [kernel.run(unregister), kernel.run(unregister)] == [0, 713]


def test_memory_is_set_and_copied_on_the_device(kernel: KernelProcess) -> None:
    kernel.run(HOST)
    kernel.run("!y = cuda.allocate(1 << 20); n = ctypes.c_size_t")
    assert kernel.run("lib.cuMemsetD32_v2(x.pointer, ctypes.c_uint(0x44434241), n(1000))") == 0
    assert kernel.run("x.read(8).decode()") == "ABCDABCD"
    assert kernel.run("x.read(4, 4000) == bytes(4)")
    assert kernel.run("lib.cuMemcpyDtoD_v2(y.pointer, x.pointer, n(4000))") == 0
    assert kernel.run("y.read(4000) == b'ABCD' * 1000")
    assert kernel.run("lib.cuMemsetD8_v2(ctypes.c_uint64(x.pointer.value + (1 << 20)), 1, n(1))") == 1


def test_events_tell_when_the_work_before_them_has_ended(kernel: KernelProcess) -> None:
    kernel.run(HOST)
    kernel.run("!a, b, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(); ms = ctypes.c_float()")
    assert kernel.run("lib.cuStreamCreate(ctypes.byref(stream), 1)") == 0
    assert kernel.run("[lib.cuEventCreate(ctypes.byref(one), 0) for one in (a, b)]") == [0, 0]
    kernel.run("!lib.cuEventRecord(a, stream); lib.driverDoubleBusy(50); lib.cuEventRecord(b, stream)")
    assert kernel.run("lib.cuEventQuery(b)") == 600
    assert kernel.run("[lib.cuEventSynchronize(b), lib.cuEventQuery(b), lib.cuStreamSynchronize(stream)]") == [0, 0, 0]
    assert kernel.run("lib.cuEventElapsedTime_v2(ctypes.byref(ms), a, b)") == 0
    assert 49 <= kernel.run("ms.value") < 1000
    assert kernel.run("[lib.cuEventDestroy_v2(a), lib.cuEventDestroy_v2(b), lib.cuStreamDestroy_v2(stream)]") == [
        0,
        0,
        0,
    ]
