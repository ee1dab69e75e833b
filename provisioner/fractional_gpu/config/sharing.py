"""The keys of a pool about how kernels share a device, and what happens to processes that use more than their share."""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from fractional_gpu.config import values
from fractional_gpu.config.values import Key, config_error
from fractional_gpu.core.model import AfterKernel, Breach, Sharing, Strangers

_WHOLE: Final = 1000  # milli-GPU


class _Choice:
    """Parses one of the words of an enumeration."""

    def __init__(self, kind: type[StrEnum]) -> None:
        self._kind = kind

    def __call__(self, value: object) -> StrEnum:
        if not isinstance(value, str) or value not in set(self._kind):
            raise ValueError("allowed: " + ", ".join(repr(one.value) for one in self._kind))
        return self._kind(value)


def _library(value: object) -> str:
    """Return the path of a library; the broker checks at its start that the file exists."""
    if value is None or value == "":
        return ""
    allowed = "allowed: the absolute path of a library, such as '/usr/local/vgpu/libvgpu.so'"
    if not isinstance(value, str) or not Path(value).is_absolute() or set(value) & set(" :\n\0"):
        raise ValueError(f"{allowed}, without spaces and colons")
    return value


SHARING_KEYS: Mapping[str, Key] = {
    "sharing": Key(
        field="sharing",
        parse=_Choice(Sharing),
        default="time-slice",
        example="mps",
        help="How kernels share a device: 'time-slice': they take turns, and idle ones are suspended; 'mps': through NVIDIA's MPS server, "
        "which limits compute and memory; 'mig': each kernel has a whole MIG instance. With 'mps' and 'mig' no kernel is suspended.",
    ),
    "breach": Key(
        field="breach",
        parse=_Choice(Breach),
        default="warn",
        example="suspend",
        help="What happens to a kernel that uses more device memory than its cap: 'warn': its user gets a notice; 'suspend': it is "
        "suspended when it is idle, and resumes where all of it fits; 'kill': its processes on the device are ended.",
    ),
    "strangers": Key(
        field="strangers",
        parse=_Choice(Strangers),
        default="show",
        example="refuse",
        help="What happens to processes on the pool's devices that belong to no kernel of the broker: 'show': status lists them; 'refuse': "
        "the broker ends them (SIGTERM, then SIGKILL) if its user may do that.",
    ),
    "after_kernel": Key(
        field="after_kernel",
        parse=_Choice(AfterKernel),
        default="keep",
        example="end",
        help="What happens to processes that a kernel started, that outlive it and that hold device memory: 'keep': they run on and keep "
        "the kernel's reservation; 'end': the broker ends them (SIGTERM, then SIGKILL) if its user may do that.",
    ),
    "suspend_unseen": Key(
        field="suspend_unseen",
        parse=values.boolean,
        default=True,
        example=False,
        help="Suspend kernels without our extension (other languages), although the broker cannot detect whether they use managed memory, "
        "which the driver cannot save. False: they stay on their device.",
    ),
    "hami_library": Key(
        field="hami_library",
        parse=_library,
        default="",
        example="/usr/local/vgpu/libvgpu.so",
        help="The library of HAMi-core, if it is installed: preloaded into the pool's kernels, it makes allocations beyond the cap fail "
        "and limits compute to the fraction.",
    ),
}


def whole_instances(where: str, raw: Mapping[Any, object], parsed: dict[str, Any]) -> None:
    """In a MIG pool offer whole instances only. Raises ConfigError for a pool that names other fractions."""
    if parsed["sharing"] is not Sharing.MIG:
        return
    if "fractions" in raw and parsed["fractions_milli"] != (_WHOLE,):
        raise config_error(
            f"{where}['fractions']",
            raw["fractions"],
            "with sharing 'mig' a kernel has a whole instance: leave it out, or say ['1']",
        )
    parsed["fractions_milli"] = (_WHOLE,)
