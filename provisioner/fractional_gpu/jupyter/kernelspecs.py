"""Manages kernelspecs for fractions of a GPU. Each pool and fraction has its own launcher entry, such as "Python 3 · 1/4 GPU".

Each kernelspec is copied from a base kernelspec, including its metadata (such as `supported_encryption`), because some servers reject
kernelspecs without this metadata. A folder is recognised as ours by a mark in the metadata, never just by its name. A new folder appears
atomically and replaces only a folder of ours for the same base, pool and fraction. With `launcher`, the kernelspec's command takes the
lease, for programs that ignore provisioners. Such a kernelspec names the local provisioner, so that Jupyter servers do not take a second
lease.
"""

import json
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager, NoSuchKernel
from jupyter_core.paths import ENV_JUPYTER_PATH, SYSTEM_JUPYTER_PATH, jupyter_path
from traitlets import TraitError

from fractional_gpu.client.seat import own_share
from fractional_gpu.core.units import format_fraction, parse_fraction_milli
from fractional_gpu.host.process import find_ipykernel
from fractional_gpu.jupyter.kernel_command import KernelPlan, check_pool_name, find_interpreter, plan_kernel
from fractional_gpu.protocol.errors import BadRequestError, FractionalGPUError, NotFoundError
from fractional_gpu.protocol.limits import MAX_NAME

PROVISIONER_NAME = "fractional-gpu-provisioner"
_NAME_PREFIX = "fractional-gpu-"
_MADE_BY = "jupyter-fractional-gpu"  # the key in metadata that marks our kernelspecs
_MARK = {"pool", "fraction_milli", "gated", "simulated", "base", "launcher"}
_DEFAULT_BASE = "python3"
_KERNELS = ("share", "jupyter", "kernels")
_NAME = re.compile(r"[a-z0-9._-]+", re.ASCII | re.IGNORECASE)  # the names that Jupyter accepts
_UNREADABLE = (OSError, ValueError, TypeError, RecursionError, TraitError)  # raised for an invalid kernel.json


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledSpec:
    """One of our kernelspecs, made from `base`.

    `gated` means that the extension will load. `launcher` means that the command takes the lease. `shadowed_by` is the folder Jupyter uses
    instead of this one.
    """

    name: str
    display_name: str
    folder: Path
    pool: str
    fraction_milli: int
    gated: bool
    simulated: bool
    launcher: bool = False
    base: str = ""
    argv: tuple[str, ...] = ()
    shadowed_by: Path | None = None
    replaced: bool = field(default=False, compare=False)  # whether this installation replaced an older one
    obstacle: str = field(default="", compare=False)  # at installation, why the extension cannot be loaded

    @property
    def command(self) -> tuple[str, ...]:
        return self.argv[self.argv.index("--") + 1 :] if self.launcher and "--" in self.argv else self.argv


def spec_name(pool: str, fraction_milli: int, *, base: str = _DEFAULT_BASE, launcher: bool = False) -> str:
    """Return the kernelspec's name, in lower case because Jupyter ignores case. Raises BadRequestError."""
    if isinstance(fraction_milli, bool) or not isinstance(fraction_milli, int) or not 1 <= fraction_milli <= 1000:
        raise BadRequestError(f"fraction {fraction_milli!r} is out of range; expected 1 to 1000 thousandths of a GPU")
    name = f"{_NAME_PREFIX}{check_pool_name(pool).lower()}-{fraction_milli}"
    if base.lower() != _DEFAULT_BASE:
        name += f"-{base.lower()}"
    return name + ("-launcher" if launcher else "")


def install(
    pool: str,
    fractions_milli: Sequence[int],
    *,
    directory: str | None = None,
    base: str = _DEFAULT_BASE,
    simulated: bool = False,
    simulate: str | None = None,
    launcher: bool = False,
    name: str | None = None,
    display_name: str | None = None,
) -> list[InstalledSpec]:
    """Install one kernelspec for each fraction (in milli-GPU), replacing earlier ones.

    `simulate` describes the simulated devices (COUNTxMEMORY) of any broker started for such a kernel. `name` and `display_name` replace the
    generated names, and are allowed only for a single fraction. The kernelspecs are installed into `directory`, which defaults to the
    environment's kernelspec folder.

    Raises BadRequestError if arguments contradict each other, NotFoundError if the base does not exist, and FractionalGPUError if the
    folder cannot be written to or contains a different kernelspec.
    """
    if display_name is not None and (
        not display_name.strip() or not display_name.isprintable() or len(display_name) > MAX_NAME
    ):
        allowed = f"expected 1 to {MAX_NAME} printable characters, not only spaces"
        raise BadRequestError(f"{display_name[:60]!r} cannot be used as a kernel's display name; {allowed}")
    names = {milli: spec_name(pool, milli, base=base, launcher=launcher) for milli in fractions_milli}
    if not names:
        raise BadRequestError("no fraction was given; give at least one, such as 1/4")
    if (name is not None or display_name is not None) and len(names) > 1:
        raise BadRequestError(f"a name can only be used with one fraction, but {len(names)} were given; give one")
    if name is not None:
        names = dict.fromkeys(names, _check_name(name))
    base_spec = _base_spec(base)
    target = (Path(sys.prefix, *_KERNELS) if directory is None else Path(directory)).absolute()
    argv, plan = _argv(base_spec, target)
    installed = []
    for milli, folder_name in names.items():
        mark = {"pool": pool, "fraction_milli": milli, "gated": plan.gated, "simulated": simulated}
        content = _content(base_spec, argv, {**mark, "base": base, "launcher": launcher})
        if display_name is not None:
            content["display_name"] = display_name
        if launcher:
            _add_launcher(content, folder_name, simulate)
        elif simulate:
            content["metadata"]["kernel_provisioner"]["config"]["simulate"] = simulate
        folder = target / folder_name
        replaces = _check_replaced(folder, content)
        _write_folder(folder, content, logo(milli))
        described = _describe(folder, content)
        installed.append(replace(described, replaced=replaces, shadowed_by=_shadow(folder), obstacle=plan.obstacle))
    return installed


def list_installed(directory: str | None = None) -> list[InstalledSpec]:
    """Return our kernelspecs in `directory` (by default, everywhere Jupyter looks), including shadowed ones."""
    # Like Jupyter, `os.path` ignores a folder that this user may not enter. `Path` raises an error in some Python versions.
    looked_at = [place for place in jupyter_path("kernels") if os.path.isdir(place)]  # noqa: PTH112 - as above
    places = [Path(place).absolute() for place in ([directory] if directory is not None else looked_at)]
    folders = dict.fromkeys(path.parent for place in places for path in sorted(place.glob("*/kernel.json")))
    contents = ((folder, _read_ours(folder)) for folder in folders)
    found = [_describe(folder, content) for folder, content in contents if content is not None]
    seen = KernelSpecManager().find_kernel_specs()
    found = [replace(spec, shadowed_by=_shadow(spec.folder, seen)) for spec in found]
    return sorted(found, key=lambda spec: (spec.pool, spec.fraction_milli, spec.name, spec.shadowed_by is not None))


def plan_of(spec: InstalledSpec) -> KernelPlan:
    content = _read_ours(spec.folder) or {}
    environment = {**os.environ, **(content.get("env") or {})}
    return plan_kernel(spec.command, environment, os.path.sep, str(content.get("language", "")))


def remove(names: Sequence[str] | None = None, *, directory: str | None = None) -> list[InstalledSpec]:
    """Remove our kernelspecs with these names (None for all), including shadowed ones, and return the ones removed.

    Raises NotFoundError before removing anything if a name is not one of ours, and FractionalGPUError for other failures.
    """
    ours = list_installed(directory)
    there = list(dict.fromkeys(spec.name for spec in ours))
    for name in names or ():
        if name not in there:
            raise NotFoundError(
                f"{name!r} is not an installed kernelspec of jupyter-fractional-gpu; installed: {', '.join(there) or 'none'}"
            )
    removed = [spec for spec in ours if names is None or spec.name in names]
    for spec in removed:
        try:
            delete_folder(spec.folder)
        except OSError as error:
            raise FractionalGPUError(f"{spec.folder} cannot be removed: {error.strerror}") from error
    return removed


def delete_folder(folder: Path) -> None:
    """Delete a kernelspec's folder. If it is a link, delete only the link, because its target belongs to the user. Raises OSError."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


class SeatKernelSpecManager(KernelSpecManager):
    """A kernelspec manager that hides our kernelspecs if they exceed the server's seat, or if the server has no seat.

    Pass this class to `--ServerApp.kernel_spec_manager_class`. The broker still decides what a kernel gets.
    """

    def find_kernel_specs(self) -> dict[str, str]:
        try:
            share = own_share()
        except FractionalGPUError as error:
            self.log.warning("Cannot list kernels with a GPU: %s", error)
            share = None
        found: dict[str, str] = super().find_kernel_specs()
        return {name: folder for name, folder in found.items() if self._is_shown(name, share)}

    def _is_shown(self, name: str, share: tuple[str, int] | None) -> bool:
        try:
            metadata: dict[str, Any] = self.get_kernel_spec(name).metadata or {}
        except NoSuchKernel:
            return True
        except _UNREADABLE:
            return True  # Jupyter logs the error, leaves this kernelspec out and shows the others
        stanza = metadata.get("kernel_provisioner")
        if not isinstance(stanza, dict) or stanza.get("provisioner_name") != PROVISIONER_NAME:
            return True
        config = stanza.get("config") or {}
        if share is None or not isinstance(config, dict) or config.get("pool", share[0]) != share[0]:
            return False
        try:
            return parse_fraction_milli(config.get("fraction", 0)) <= share[1]
        except ValueError:
            return True  # the kernel's start is refused with the reason


def logo(milli: int) -> str:
    if milli >= 1000:
        share = '<circle cx="32" cy="32" r="26" fill="#2f9e44"/>'
    else:
        angle = 2 * math.pi * milli / 1000
        x, y = 32 + 26 * math.sin(angle), 32 - 26 * math.cos(angle)
        large = int(milli > 500)
        share = f'<path d="M32 32V6A26 26 0 {large} 1 {x:.2f} {y:.2f}Z" fill="#2f9e44"/>'
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 64 64" width="64" height="64">'
        '<circle cx="32" cy="32" r="29" fill="#f1f3f5" stroke="#495057" stroke-width="3"/>'
        f"{share}</svg>\n"
    )


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name) or not name.strip("."):
        raise BadRequestError(f"{name!r} is not a valid kernelspec name; use letters, digits, and . _ -, not only dots")
    return name.lower()


def _base_spec(base: str) -> KernelSpec:
    manager = KernelSpecManager()
    try:
        spec = manager.get_kernel_spec(base)
    except NoSuchKernel:
        there = ", ".join(sorted(manager.find_kernel_specs())) or "none"
        raise NotFoundError(f"there is no kernelspec named {base!r} to copy from; installed: {there}") from None
    if "kernel_provisioner" in (spec.metadata or {}):
        raise BadRequestError(
            f"kernelspec {base!r} cannot be copied, because it already uses a kernel provisioner; name a plain one, such as python3"
        )
    return spec


def _argv(base: KernelSpec, target: Path) -> tuple[list[str], KernelPlan]:
    argv = [word.replace("{resource_dir}", base.resource_dir) for word in base.argv]
    environment = {**os.environ, **(base.env or {})}
    if find_ipykernel(argv) is not None:
        # For jupyter_client, `python` is the server's own interpreter, so another server would use a different one. With the full path,
        # programs such as jupytext would mistake our kernelspec for their own interpreter's.
        interpreter = find_interpreter(argv[0], environment) or argv[0]
        own = str(target.parent) in {*ENV_JUPYTER_PATH} - {*SYSTEM_JUPYTER_PATH}
        argv[0] = "python" if own and interpreter == sys.executable else interpreter
    return argv, plan_kernel(argv, environment, base.resource_dir, base.language)


def _content(base: KernelSpec, argv: list[str], mark: Mapping[str, Any]) -> dict[str, Any]:
    pool, milli = mark["pool"], mark["fraction_milli"]
    words = [(base.display_name or "Kernel").replace(" (ipykernel)", ""), f"{format_fraction(milli)} GPU"]
    words += [pool] if pool != "default" else []
    words[-1] += " (simulated)" if mark["simulated"] else ""
    words += ["launcher"] if mark["launcher"] else []
    config = {"pool": pool, "fraction": f"{milli}m"}
    content: dict[str, Any] = {
        "argv": argv,
        "display_name": " · ".join(words),
        "language": base.language,
        "interrupt_mode": base.interrupt_mode,
        "metadata": {
            **(base.metadata or {}),
            "kernel_provisioner": {"provisioner_name": PROVISIONER_NAME, "config": config},
            _MADE_BY: mark,
        },
    }
    if base.env:
        content["env"] = dict(base.env)
    if base.kernel_protocol_version:
        content["kernel_protocol_version"] = base.kernel_protocol_version
    return content


# The program that a launcher kernelspec runs. If the kernelspec outlives the package, the program says so, because other programs show the
# output of a failed kernel. It contains no braces, which Jupyter would replace in commands. The sentence follows as the first argument.
_LAUNCH = """
import sys
sentence = sys.argv.pop(1)
try:
    from fractional_gpu.jupyter.launcher import main
except ModuleNotFoundError as error:
    if error.name != "fractional_gpu":
        raise
    sys.exit(sentence)
sys.exit(main())
""".lstrip()


def _add_launcher(content: dict[str, Any], name: str, simulate: str | None) -> None:
    asked = content["metadata"]["kernel_provisioner"]["config"]
    gone = (
        f"This kernel needs the package jupyter-fractional-gpu, which is no longer installed: reinstall it for {sys.executable}, or "
        f"remove the kernel (`jupyter kernelspec remove {name}`)."
    )
    words = ["--pool", asked["pool"], "--fraction", asked["fraction"], "--language", content["language"]]
    words += ["--simulate", simulate] if simulate else []
    words += ["--label", content["display_name"]]
    content["argv"] = [sys.executable, "-P", "-c", _LAUNCH, gone, *words, "--", *content["argv"]]
    content["metadata"]["kernel_provisioner"] = {"provisioner_name": "local-provisioner", "config": {}}


def _read_ours(folder: Path) -> Mapping[str, Any] | None:
    try:
        content = json.loads((folder / "kernel.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    metadata = content.get("metadata") if isinstance(content, dict) else None
    mark = metadata.get(_MADE_BY) if isinstance(metadata, dict) else None
    return content if isinstance(mark, dict) and mark.keys() == _MARK else None


def _check_replaced(folder: Path, content: Mapping[str, Any]) -> bool:
    """Return whether the folder holds our kernelspec for this base, pool and fraction. Raises FractionalGPUError if it holds another."""
    if not os.path.lexists(folder):
        return False
    before = _read_ours(folder)
    if before is None:
        raise FractionalGPUError(
            f"{folder} exists and was not made by jupyter-fractional-gpu; remove or rename it, or install elsewhere"
        )
    old, new = _describe(folder, before), _describe(folder, content)
    if (old.pool, old.fraction_milli, old.base, old.launcher) != (new.pool, new.fraction_milli, new.base, new.launcher):
        raise FractionalGPUError(
            f"{folder} is another kernelspec, {old.display_name!r} ({format_fraction(old.fraction_milli)} GPU of pool {old.pool!r}, "
            f"made from {old.base}); give the new one another name (--name), or remove the existing one first"
        )
    return True


def _shadow(folder: Path, seen: Mapping[str, str] | None = None) -> Path | None:
    """Return the folder Jupyter uses instead of this one for the same name, or None. `seen` contains all kernelspecs Jupyter finds."""
    seen = KernelSpecManager().find_kernel_specs() if seen is None else seen
    found = seen.get(folder.name.lower())
    return None if found is None or os.path.realpath(found) == os.path.realpath(folder) else Path(found)


def _write_folder(folder: Path, content: Mapping[str, Any], svg: str) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
            fresh = Path(scratch) / "new"
            fresh.mkdir(mode=0o755)
            (fresh / "kernel.json").write_text(
                json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
            )
            (fresh / "logo-svg.svg").write_text(svg, encoding="utf-8")
            if folder.exists():
                folder.rename(Path(scratch) / "old")
            fresh.rename(folder)
    except OSError as error:
        is_own = folder.parent == Path(KernelSpecManager().user_kernel_dir)
        elsewhere = "" if is_own else "for your user (--user), or "
        raise FractionalGPUError(
            f"could not write the kernelspec {folder.name} to {folder.parent} ({error.strerror}); install it {elsewhere}in a folder "
            "that you can write to (--prefix FOLDER)"
        ) from error


def _describe(folder: Path, content: Mapping[str, Any]) -> InstalledSpec:
    mark, argv = content["metadata"][_MADE_BY], content.get("argv")
    return InstalledSpec(
        name=folder.name,
        display_name=str(content.get("display_name", folder.name)),
        folder=folder,
        **mark,
        argv=tuple(map(str, argv)) if isinstance(argv, list) else (),
    )
