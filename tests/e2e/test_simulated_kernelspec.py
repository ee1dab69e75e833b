"""A kernelspec that was installed for simulated devices is used later, by programs that know nothing of them."""

import subprocess
import sys
from pathlib import Path

from tests.support.world import World

CELL = """
from fractional_gpu.gpu.simulated import cuda
buffer = cuda.allocate(1 << 20)
buffer.write(b"simulated")
print(buffer.read()[:9])
"""


def test_it_works_when_the_broker_that_it_was_installed_from_has_ended(world: World) -> None:
    environment = {name: value for name, value in world.environment.items() if name != "JUPYTER_GPU_SIMULATE"}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [Path(sys.executable).with_name("jupyter"), *arguments],
            env=environment,
            cwd=world.notebooks,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "(simulated)" in run("gpu", "kernels", "install", "--simulate", "1x1GiB", "--user")
    run("gpu", "broker", "--stop")
    (world.notebooks / "cell.py").write_text(CELL)
    assert "b'simulated'" in run("run", "--kernel=fractional-gpu-default-250", "cell.py")
    assert world.status().simulated
