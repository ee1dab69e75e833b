"""The limits of another pod, read from within a container: a real control group namespace, and the whole hierarchy mounted."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from uuid import uuid4

import pytest

from fractional_gpu.host.control_groups import absolute, levels_up
from tests.support.control_group import JOIN, pod_group, set_limit
from tests.support.paths import PYTHONPATH

LIMIT_MIB = 384
# Within the namespace: the container's view at /sys/fs/cgroup, and the host's view if that was mounted before.
_CONTAINER = """
umount -R /sys/fs/cgroup
mount -t tmpfs none /sys/fs/cgroup
mkdir /sys/fs/cgroup/own
{own}
exec {python} -c '
import json, sys
from fractional_gpu.host.memory import LimitReader, group_limit
from fractional_gpu.host.workload import find_group, group_exists, memory_warning
pid, uid = int(sys.argv[1]), sys.argv[2]
group = find_group("kubernetes", uid)
limit = group_limit(group) if group else None
room = LimitReader().headroom(pid)
print(json.dumps([room.mib, room.limited_by, group, limit.mib if limit else None, group_exists(group) if group else None,
    memory_warning("kubernetes", group, 4096) if group else ""]))
' "$@"
"""


def test_a_path_of_a_namespace_is_one_of_the_host_again() -> None:
    own = PurePosixPath("/kubepods/podA/c")
    seen = {
        "/": own,
        "/d": own / "d",
        "/../x": PurePosixPath("/kubepods/podA/x"),
        "/../../podB/c": PurePosixPath("/kubepods/podB/c"),
    }
    assert {PurePosixPath(path): absolute(PurePosixPath(path), own) for path in seen} == {
        PurePosixPath(path): found for path, found in seen.items()
    }
    assert absolute(PurePosixPath("/../../../init.scope"), own) == PurePosixPath("/init.scope")
    assert absolute(PurePosixPath("/../../.."), own) == PurePosixPath("/")
    assert absolute(PurePosixPath("/../../../../.."), own) == PurePosixPath("/"), "above the root is the root"
    roots = {"/": 0, "/..": 1, "/../../..": 3, "/../a": 0, "/kubepods": 0}
    assert {root: levels_up(PurePosixPath(root)) for root in roots} == roots


@pytest.fixture
def pod() -> Iterator[tuple[str, int]]:
    """A pod's UID, and a process in its group, which has little memory."""
    uid = str(uuid4())
    with pod_group(uid) as group:
        set_limit(group, LIMIT_MIB)
        program = f"{JOIN.format(group=str(group))}\nprint(flush=True); open(0).read()"
        with subprocess.Popen(
            [sys.executable, "-S", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            yield uid, process.pid
            process.communicate()


@pytest.mark.skipif(os.geteuid() != 0, reason="control groups and mounts are root's")
@pytest.mark.parametrize("whole", [True, False])
def test_another_pods_limit_is_seen_from_a_container_where_the_host_path_is_mounted(
    pod: tuple[str, int], tmp_path: Path, *, whole: bool
) -> None:
    uid, pid = pod
    version_1 = Path("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists()
    host = "/sys/fs/cgroup/memory" if version_1 else "/sys/fs/cgroup"
    own = f"mount -t {'cgroup -o memory' if version_1 else 'cgroup2'} none /sys/fs/cgroup/own"
    whole_tree = tmp_path / "whole"
    whole_tree.mkdir()
    script = _CONTAINER.format(own=own, python=sys.executable)
    bind = f"mount --bind {host} {whole_tree}" if whole else "true"
    with pod_group(str(uuid4())) as container:
        done = subprocess.run(
            [
                *("unshare", "--mount", "sh", "-ec"),
                f'{bind}; echo $$ > {container}/cgroup.procs; exec unshare --cgroup sh -ec "$SCRIPT" sh "$@"',
                *("sh", str(pid), uid),
            ],
            env={**os.environ, "SCRIPT": script, "PYTHONPATH": PYTHONPATH},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=60,
        )
    left_mib, limited_by, group, limit_mib, exists, warning = json.loads(done.stdout)
    if whole:
        assert left_mib <= LIMIT_MIB
        assert f"pod{uid}" in limited_by
        assert (group, limit_mib, exists) == (f"/kubepods/pod{uid}", LIMIT_MIB, True)
        assert "raise resources.limits.memory" in warning
    else:
        assert (left_mib > LIMIT_MIB, group, limited_by) == (True, "", "the system's memory"), (
            "what the manifest's host path is for"
        )
