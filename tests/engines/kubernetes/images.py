"""`tests/run images`: builds the images of examples/kubernetes and runs them as on a node, without Kubernetes.

Each base is the same Debian from `debootstrap`, imported under the name that the Dockerfile pins, because registries may be out of reach.
The containers run under podman with the arguments, users, capabilities, environment and mounts of the DaemonSet. What differs: the GPU is
simulated, the API server is the tests' own, and all containers of the node share the host's network. The user's pod has no network.

Needs root, podman, buildah, runc, debootstrap, kubectl, openssl, and package indexes of Debian and Python.
"""

import argparse
import json
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import yaml

from fractional_gpu.client.seat import SeatClient
from fractional_gpu.engines.pods import resource_of
from fractional_gpu.host.control_groups import mounts
from tests.engines.kubernetes.api_server import TOKEN, ApiServer
from tests.engines.kubernetes.conftest import EXAMPLES, NODE, rendered, rules_of
from tests.engines.kubernetes.pods import pod_of, uid_of
from tests.installs.story import build_wheel
from tests.support.stories import CHECK, fill
from tests.support.world import until

SUITE: Final = "trixie"
PYTHON: Final = "3.13"
"""Debian's Python in that suite."""
BASES: Final = {
    "Dockerfile": [],
    "Dockerfile.hub": ["USER 1000"],
    "Dockerfile.singleuser": [
        "USER 1000",
        "WORKDIR /home/jovyan",
        "ENV HOME=/home/jovyan",
        "ENV PATH=/opt/conda/bin:/usr/local/bin:/usr/bin:/bin",
    ],
}
"""What sets apart the images that each Dockerfile builds on."""
SIMULATED: Final = {"broker": ["--simulate=1x2GiB"], "worker": ["--backend=simulated"]}
USER: Final = "200007:100"
"""A user's pod, as the spawner sets it: the uid is `gpu_first_uid` plus the user's id in the hub."""
SHM: Final = Path("/dev/shm")  # noqa: S108 - a new one: the simulated GPU's memory, and podman's locks
_LIMITS: Final = ("--ulimit", "nofile=20000:20000", "--ulimit", "nproc=20000:20000")
"""Podman's own are above what root may set on some machines."""
_PREPARE: Final = """
rm -f /usr/lib/python3*/EXTERNALLY-MANAGED
useradd --uid 1000 --gid 100 --create-home jovyan
chmod 2775 /home/jovyan
python -m venv /opt/conda
chown -R 1000:100 /opt/conda
"""
_KERNEL: Final = """
import json, sys
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel(kernel_name="fractional-gpu-default-250", startup_timeout=120)
for line in sys.stdin:
    said = []
    client.execute_interactive(json.loads(line), timeout=120, output_hook=said.append)
    said = [one["content"] for one in said if one["msg_type"] in ("stream", "error")]
    print(json.dumps([one.get("text") or one.get("evalue") for one in said]), flush=True)
manager.shutdown_kernel(now=True)
"""


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run(*command: str | Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout.strip()


def names() -> dict[str, str]:
    """Return the image that each Dockerfile builds, as the manifests name them."""
    values = yaml.safe_load((EXAMPLES / "zero-to-jupyterhub.yaml").read_text())
    (node,) = yaml.safe_load((EXAMPLES / "kustomization.yaml").read_text())["images"]
    images = {"Dockerfile": (node["newName"], node["newTag"])}
    for part in ("hub", "singleuser"):
        images[f"Dockerfile.{part}"] = (values[part]["image"]["name"], values[part]["image"]["tag"])
    return {name: f"{image}:{tag}" for name, (image, tag) in images.items()}


def arguments(dockerfile: str) -> dict[str, str]:
    """Return the defaults of a Dockerfile's ARGs."""
    lines = (EXAMPLES / dockerfile).read_text().splitlines()
    given = [line.removeprefix("ARG ").partition("=") for line in lines if line.startswith("ARG ")]
    return {name: value for name, _, value in given}


class Node:
    """The machine with podman's images and containers, all in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        store: list[str | Path] = [
            "--root",
            folder / "images",
            "--runroot",
            folder / "running",
            "--storage-driver",
            "overlay",
        ]
        self._buildah: list[str | Path] = ["buildah", *store]
        self.command: list[str | Path] = [
            "podman",
            *store,
            "--tmpdir",
            folder / "podman",
            "--cgroup-manager",
            "cgroupfs",
        ]
        self.command += ["--runtime", "runc"]
        self.environment = {"JUPYTER_GPU_SOCKET": "/run/jupyter-gpu/broker.sock"}
        for name in ("run", "state", "token", "worker", "tmp", "config"):
            (folder / name).mkdir()
            (folder / name).chmod(0o1777 if name in ("tmp", "worker") else 0o755)
        shutil.copy(EXAMPLES / "jupyter_gpu_config.py", folder / "config")

    def podman(self, *words: str | Path) -> str:
        return run(*self.command, *words)

    def make_bases(self, archive: Path) -> None:
        """Import Debian as the base of each Dockerfile. `archive` is made unless it exists."""
        if not archive.exists():
            root = self.folder / "debian"
            packages = "python3,python3-pip,python3-venv,python-is-python3,ca-certificates"
            run("debootstrap", "--variant=minbase", f"--include={packages}", SUITE, root)
            run("chroot", root, "sh", "-ec", _PREPARE)
            run("tar", "-C", root, "--one-file-system", "-cf", archive, ".")
        for dockerfile, changes in BASES.items():
            given = arguments(dockerfile)
            options = [word for change in changes for word in ("--change", change)]
            self.podman("import", "--quiet", *options, archive, given["BASE"] + given["DIGEST"])

    def build(self, dockerfile: str, image: str, wheel: Path, wheels: Path) -> None:
        """Build an image from our wheel. Its dependencies are in `wheels`, to which the mounted configuration of pip leads."""
        context = self.folder / dockerfile
        context.mkdir()
        shutil.copy(EXAMPLES / dockerfile, context)
        shutil.copy(wheel, context)
        (self.folder / "pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheels\n")
        volumes = ["--volume", f"{wheels}:/wheels:ro", "--volume", f"{self.folder}/pip.conf:/etc/pip.conf:ro"]
        build = ["bud", "--isolation", "chroot", "--pull-never", "--network", "host", *volumes]
        run(*self._buildah, *build, "--tag", image, "--file", context / dockerfile, context)

    def start(self, name: str, image: str, options: Sequence[str | Path], words: Sequence[str]) -> None:
        options = ["--detach", "--name", name, "--pull", "never", f"--volume={SHM}:{SHM}", *options]
        self.podman("run", *_LIMITS, *options, image, *words)

    def inside(self, name: str, *words: str) -> str:
        """Run a command in a container and print it with its output."""
        said = self.podman("exec", name, *words)
        say(f"{name}# {' '.join(words)}\n{said}")
        return said


def of_container(
    node: Node, pod: Mapping[str, Any], container: Mapping[str, Any], variables: Mapping[str, str]
) -> list[str]:
    """Return podman's options for a container of the DaemonSet."""
    context = container["securityContext"]
    options = ["--network", "host", "--user", str(context["runAsUser"])]
    if pod["hostPID"]:
        options += ["--pid", "host"]
    if context.get("privileged"):
        options += ["--privileged"]
    if context.get("allowPrivilegeEscalation") is False:
        options += ["--security-opt", "no-new-privileges"]
    if context["readOnlyRootFilesystem"]:
        options += ["--read-only", "--read-only-tmpfs=false"]
    for kind in ("drop", "add"):
        options += [f"--cap-{kind}={name}" for name in context.get("capabilities", {}).get(kind, [])]
    given = {one["name"]: one.get("value", NODE) for one in container["env"]}
    options += [f"--env={name}={value}" for name, value in {**given, **variables}.items()]
    options += [f"--memory={container['resources']['limits']['memory'].removesuffix('i').lower()}"]
    for mount in container["volumeMounts"]:
        source = "/sys/fs/cgroup" if mount["name"] == "cgroup" else str(node.folder / mount["name"])
        options += [f"--volume={source}:{mount['mountPath']}:{'ro' if mount.get('readOnly') else 'rw'},rslave"]
    return options


def identity(node: Node, name: str) -> str:
    """Return the ids and capabilities of a container's first process, as the host sees them."""
    pid = node.podman("inspect", "--format", "{{.State.Pid}}", name)
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    wanted = ("Uid:", "Gid:", "CapEff:", "NoNewPrivs:", "Seccomp:")
    return "  ".join(line.replace("\t", " ") for line in status if line.startswith(wanted))


def start_daemon_set(node: Node, images: Mapping[str, str], url: str) -> None:
    """Start the containers of the DaemonSet's pod, and wait until its readiness probes succeed."""
    (found,) = [one for one in rendered(EXAMPLES) if one["kind"] == "DaemonSet"]
    pod = found["spec"]["template"]["spec"]
    host, port = url.removeprefix("https://").split(":")
    for container in pod["containers"]:
        name, api = container["name"], {}
        assert container["image"] == images["Dockerfile"]
        if name == "agent":
            api = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        words = [word.replace("$(NODE_NAME)", NODE) for word in container["args"]] + SIMULATED.get(name, [])
        node.start(name, container["image"], of_container(node, pod, container, api), words)
    for container in pod["containers"]:
        if "readinessProbe" in container:
            probe = container["readinessProbe"]["exec"]["command"]

            def ready(name: str = container["name"], probe: Sequence[str] = probe) -> bool:
                try:
                    node.podman("exec", name, *probe)
                except AssertionError:
                    return False
                return True

            until(ready, f"{container['name']} is ready")
        say(f"{container['name']}: {identity(node, container['name'])}")


def stop_daemon_set(node: Node) -> None:
    for name in ("broker", "worker", "agent"):
        node.podman("stop", "--time", "120", name)
        node.podman("rm", name)


class Kernel:
    """A kernel in the user's container."""

    def __init__(self, node: Node) -> None:
        command = [*node.command, "exec", "--interactive", "user", "python", "-c", _KERNEL]
        self.process = subprocess.Popen(
            [str(part) for part in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, code: str) -> Any:  # noqa: ANN401 - JSON
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def states(node: Node) -> list[str]:
    status = json.loads(node.podman("exec", "broker", "jupyter-gpu", "status", "--json"))
    return [lease["lease"]["state"] for lease in status["leases"]]


def use(node: Node, images: Mapping[str, str], server: ApiServer) -> None:
    """Run a user's kernel against the DaemonSet's pod, and replace that pod while the kernel is suspended."""
    start_daemon_set(node, images, server.url)
    pod = pod_of(1, annotations={"fractional-gpu.jupyter.org/owner": "ada"})
    server.put(pod)
    options = ["--user", USER, "--cap-drop=ALL", "--security-opt", "no-new-privileges", "--network", "none"]
    options += [f"--cgroup-parent=/kubepods/pod{uid_of(1)}", f"--volume={node.folder}/run:/run/jupyter-gpu:ro"]
    options += [f"--env={name}={value}" for name, value in node.environment.items()]
    node.start("user", images["Dockerfile.singleuser"], options, ["sleep", "infinity"])
    say(f"user: {identity(node, 'user')}")
    node.inside("user", "id")
    with SeatClient(str(node.folder / "run" / "broker.sock"), timeout_s=60) as client:
        until(lambda: client.seats().seats, "the agent has registered the pod's seat")
    node.inside("user", "jupyter", "gpu", "status")
    kernel = Kernel(node)
    assert kernel.run(fill(1)) == []
    node.inside("broker", "jupyter-gpu", "status")
    node.inside("broker", "jupyter-gpu", "suspend", "--all")
    until(lambda: states(node) == ["suspended"], "the kernel is suspended")
    assert kernel.run(CHECK) == ["intact\n"]
    say("suspended by the broker's container, and intact at the next cell")
    node.inside("broker", "jupyter-gpu", "suspend", "--all")
    until(lambda: states(node) == ["suspended"], "the kernel is suspended")
    stop_daemon_set(node)
    (said,) = kernel.run(CHECK)
    assert said.startswith("This cell did not run."), said
    say(f"without a broker: {said}")
    start_daemon_set(node, images, server.url)
    assert states(node) == ["suspended"]
    assert kernel.run(CHECK) == ["intact\n"]
    say("suspended while all containers of the DaemonSet were replaced, and intact at the next cell")
    kernel.process.communicate()
    until(lambda: not states(node), "the lease ended with its kernel")
    assert server.defects == []
    until(lambda: resource_of("default") in server.nodes[NODE]["status"]["capacity"], "the agent has counted")
    say(f"the node's capacity: {server.nodes[NODE]['status']['capacity']}")


@contextmanager
def api_server(folder: Path) -> Iterator[ApiServer]:
    """The stand-in for the API server, with TLS and a service account's token, as a pod finds them."""
    key, certificate = folder / "key.pem", folder / "token" / "ca.crt"
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    run("openssl", "req", "-x509", "-nodes", "-newkey", "rsa:2048", "-keyout", key, "-out", certificate, *subject)
    (folder / "token" / "token").write_text(TOKEN)
    (folder / "token" / "namespace").write_text("jupyter-gpu")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    with ApiServer(rules_of(rendered(EXAMPLES)), tls=tls) as server:
        server.add_node(NODE)
        yield server


def story(folder: Path, cache: Path | None) -> None:
    images = names()
    for place in (folder, SHM):
        run("mount", "-t", "tmpfs", "-o", "mode=1777", "none", place)
    folder.chmod(0o755)
    node = Node(folder)
    wheel = build_wheel(folder)
    say(f"built {wheel.name}")
    downloads = cache or folder / "downloads"
    wheels = downloads / "wheels"
    if not wheels.exists():
        target: list[str | Path] = ["--python-version", PYTHON, "--only-binary=:all:", "--dest", wheels]
        extras = f"{wheel}[cuda,kubernetes,kubespawner,lab]"
        run(sys.executable, "-m", "pip", "download", "--quiet", *target, extras, "jupyterhub")
    node.make_bases(downloads / "debian.tar")
    for dockerfile, image in images.items():
        node.build(dockerfile, image, wheel, wheels)
        shape = "{{.Config.User}} {{.Size}} {{json .Config.Labels}}"
        say(f"built {image}: user, bytes, labels: {node.podman('image', 'inspect', '--format', shape, image)}")
    words = ["python", "-c", "import os, fractional_gpu_hub.engines.kubernetes; print('uid', os.getuid())"]
    say(f"hub: {node.podman('run', '--rm', '--network', 'none', *_LIMITS, images['Dockerfile.hub'], *words)}")
    with api_server(folder) as server:
        use(node, images, server)


def remove_groups() -> None:
    """Remove the control groups of the containers, whose processes have ended."""
    for mount in mounts():
        if top := mount.folder(mount.root):
            for name in (f"kubepods/pod{uid_of(1)}", "kubepods", "libpod_parent"):
                for group, *_ in os.walk(top / name, topdown=False):
                    with suppress(OSError):  # other containers are in it
                        Path(group).rmdir()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="keep what is downloaded in this folder, for the next time")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside is not None:
        story(given.inside, given.cache)
        return
    assert os.getuid() == 0, "this needs root"
    folder = Path(tempfile.mkdtemp(prefix="jupyter-gpu-images-"))
    again: list[str | Path] = [sys.executable, "-m", "tests.engines.kubernetes.images", "--inside", folder]
    if given.cache:
        again += ["--cache", given.cache.absolute()]
    try:
        # All mounts and processes end with the namespaces.
        apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        status = subprocess.run([*apart, *again], check=False).returncode
    finally:
        remove_groups()
        folder.rmdir()
    sys.exit(status)


if __name__ == "__main__":
    main()
