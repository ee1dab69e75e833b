"""Two kernels whose caps together exceed one device take turns on it, and keep every byte."""

from tests.support.world import Server, World

FILL = """
import hashlib, random
from fractional_gpu.gpu.simulated import cuda
data = random.Random({seed}).randbytes(1 << 20) * 16
buffer = cuda.allocate(len(data))
buffer.write(data)
digest = hashlib.sha256(data).hexdigest()
del data
"""
CHECK = """
read = buffer.read()
assert hashlib.sha256(read).hexdigest() == digest, "the bytes differ"
print("intact")
"""


def test_ten_turns_to_and_fro_keep_every_byte(world: World, server: Server) -> None:
    (name,) = world.install(750)
    first, second = server.start(name), server.start(name)
    first.must(FILL.format(seed=1))
    second.must(FILL.format(seed=2))
    assert world.await_state(first.kernel_id, "suspended").lease.saved_mib >= 16
    for turn in range(10):
        running, other = (first, second) if turn % 2 == 0 else (second, first)
        assert running.must(CHECK).text == "intact\n"
        assert world.lease(running.kernel_id).state == "resident"
        assert world.lease(other.kernel_id).state == "suspended"
    for notebook in (first, second):
        assert notebook.must(CHECK).text == "intact\n"
        lease = world.lease(notebook.kernel_id)
        assert lease.suspends >= 5
        assert lease.resumes >= 5
    assert world.status().devices[0].reserved_mib == 768
    first.shut_down()
    second.shut_down()
    assert world.status().leases == []
