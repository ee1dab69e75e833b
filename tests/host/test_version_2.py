"""Control groups of version 2 for real: names as Slurm's plugin, the kubelet and systemd make them, in a mount namespace without version 1.

The memory controller is the machine's, perhaps of version 1: this file does not test limits.
"""

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.support.paths import PYTHONPATH

pytestmark = [
    pytest.mark.promise("workload-seat"),
    pytest.mark.skipif(os.geteuid() != 0, reason="control groups and mounts are root's"),
]

JOB, POD = str(secrets.randbelow(10**9) + 10**9), str(uuid4())
# {slice}: the pod's UID as systemd writes it.
OF_JOBS = [
    "system.slice/slurmstepd.scope/job_{job}/step_0/user/task_0",
    "system.slice/n1_slurmstepd.scope/job_{job}/step_extern/user/task_special",
]
OF_PODS = [
    "kubepods.slice/kubepods-pod{slice}.slice/crio-{pod}.scope",
    "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{slice}.slice/cri-containerd-{pod}.scope",
    "kubepods/besteffort/pod{pod}/{pod}",
    "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{slice}.slice/cri-containerd-{pod}.scope",
]
OF_USERS = [
    "user.slice/user-1000.slice/user@1000.service/system.slice/slurmstepd.scope/job_{job}",
    "system.slice/jupyterhub-singleuser\\x2d{pod}.service",
    "jfg {pod}:0::/\t\\134 é/slurm/uid_0/job_{job}",
]
READ = """
import json, sys
from fractional_gpu.host.memory import memory_groups
from fractional_gpu.host.workload import find_group, group_exists, workload_of
def read(pid):
    found = workload_of(pid)
    group = find_group(found.engine, found.id) if found else ""
    own = memory_groups(pid).get(2, [None])[0]
    return [found and found.id, found and found.group, group, group_exists(group) if group else None, str(own)]
"""
IN_A_GROUP = (
    READ
    + """
import os, pathlib, subprocess
top, path, *reader = pathlib.Path("/sys/fs/cgroup"), *sys.argv[1:]
made = [folder for folder in (top / path, *(top / path).parents) if not folder.exists()]
(top / path).mkdir(parents=True, exist_ok=True)
try:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        (top / path / "cgroup.procs").write_text(str(process.pid))
        if reader:
            said = json.loads(subprocess.run([*reader, str(process.pid)], stdout=subprocess.PIPE, check=True).stdout)
        else:
            said = read(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        group = said[2]
        if group:
            for folder in made:
                if folder.is_relative_to(f"{top}{group}"):
                    folder.rmdir()
            said += [group_exists(group), find_group("slurm" if "slurm" in group else "kubernetes", said[0])]
            said.append(read(process.pid)[0])
finally:
    for folder in made:
        try:
            folder.rmdir()
        except FileNotFoundError:
            pass
        except OSError:
            break  # another's group is below it
print(json.dumps(said))
"""
)
PURE = "umount -R -l /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup; "
# As a container sees it: a namespace that begins with its own group, and the whole hierarchy mounted elsewhere.
CONTAINER = """
mkdir -p {container}
trap 'rmdir -p --ignore-fail-on-non-empty {container} 2>/dev/null || true' EXIT
mount --bind /sys/fs/cgroup {beside}
echo $BASHPID >{container}/cgroup.procs
"$@"
echo $BASHPID >/sys/fs/cgroup/cgroup.procs
"""


def run(*words: str) -> list[Any]:
    """Run a program on a machine that has version 2 alone, and return what it printed."""
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", f'{PURE}exec "$@"', "sh", *words],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    found: list[Any] = json.loads(done.stdout)
    return found


def named(form: str) -> str:
    """A path of this process's own job and pod."""
    return form.format(job=JOB, pod=POD, slice=POD.replace("-", "_"))


@pytest.mark.parametrize("form", [*OF_JOBS, *OF_PODS])
def test_a_workload_is_known_by_its_group_and_gone_with_it(form: str) -> None:
    path = named(form)
    name, group, *found = run(sys.executable, "-c", IN_A_GROUP, path)
    assert name == (JOB if form in OF_JOBS else POD)
    assert f"/{path}".startswith(f"{group}/")
    assert name in group.replace("_", "-")
    assert found == [group, True, f"/sys/fs/cgroup/{path}", False, "", name]


@pytest.mark.parametrize("form", OF_USERS)
def test_a_group_of_a_user_or_a_service_is_no_workload(form: str) -> None:
    found = run(sys.executable, "-c", IN_A_GROUP, named(form))
    assert found == [None, None, "", None, f"/sys/fs/cgroup/{named(form)}"]


@pytest.mark.parametrize("form", [OF_JOBS[0], *OF_PODS[:2]])
def test_a_container_sees_other_workloads_as_the_host_does(form: str, tmp_path: Path) -> None:
    path = named(form)
    own = f"/sys/fs/cgroup/kubepods.slice/kubepods-pod{str(uuid4()).replace('-', '_')}.slice/crio-{JOB}.scope"
    script = CONTAINER.format(container=own, beside=tmp_path)
    program = f"READ={READ}print(json.dumps(read(int(sys.argv[1]))))"
    inside = f'{PURE}exec {sys.executable} -c "$READ" "$@"'
    enter = ["unshare", "--mount", "--cgroup", "env", program, "sh", "-ec", inside, "sh"]
    found = run(sys.executable, "-c", IN_A_GROUP, path, "bash", "-ec", script, "bash", *enter)
    name = JOB if form in OF_JOBS else POD
    assert found[:2] == [name, ""], "the names between are hidden"
    assert f"/{path}".startswith(f"{found[2]}/")
    assert found[3:] == [True, f"{tmp_path}/{path}", False, "", name]
