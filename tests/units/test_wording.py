"""The public API (docs/extending.md): golden/public_api.txt has its names and signatures, so that changes are seen and intended."""

import enum
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.support.golden import check_wording
from tests.support.paths import ROOT

GOLDEN = Path(__file__).with_name("golden")
PUBLIC: Final = {
    "fractional_gpu": ("FractionalGPUProvisioner", "KeepingKernelManager", "SeatKernelSpecManager"),
    "fractional_gpu.gpu.interface": None,
    "fractional_gpu.gpu.open": ("DeviceKind",),
    "fractional_gpu_hub": ("configure",),
    "fractional_gpu_hub.service": ("add_page",),
    "fractional_gpu_hub.base": ("GPUChoiceMixin",),
    "fractional_gpu_hub.mixin": ("FractionalGPUMixin",),
    "fractional_gpu_hub.engines": ("Allocation", "EngineGPUMixin", "NodePool"),
    "fractional_gpu_kernel.measure": ("tick",),
}
"""Module -> its public names; None: all that are defined there."""


def _described(module: str, names: tuple[str, ...] | None) -> Iterator[str]:
    found = importlib.import_module(module)
    for name in names or sorted(name for name, one in vars(found).items() if getattr(one, "__module__", "") == module):
        yield f"{module}.{name}{_shape(getattr(found, name))}"


def _shape(one: object) -> str:
    if inspect.isfunction(one):
        return _signature(one)
    assert isinstance(one, type)
    if issubclass(one, enum.StrEnum):
        return "".join(f"\n    {member.name} = {member.value!r}" for member in one)
    own = {name: part for name, part in vars(one).items() if not name.startswith("_") and inspect.isfunction(part)}
    fields = getattr(one, "__dataclass_fields__", {})
    traits = one.class_own_traits(config=True) if hasattr(one, "class_own_traits") else {}
    lines = [f"{name}: {inspect.formatannotation(field.type)}" for name, field in fields.items()]
    lines += [f"c.{one.__name__}.{name}" for name in sorted(traits) if name.startswith("gpu_")]
    lines += [f"{name}{_signature(part)}" for name, part in sorted(own.items())]
    lines += [
        f"{name} (property)"
        for name, part in sorted(vars(one).items())
        if isinstance(part, property) and name[0] != "_"
    ]
    return "".join(f"\n    {line}" for line in lines)


def _signature(function: object) -> str:
    assert callable(function)
    return str(inspect.signature(function)).replace("pathlib._local.Path", "pathlib.Path")  # as Python 3.13 calls it


def test_the_public_api_is_as_it_was_read() -> None:
    check_wording(
        GOLDEN / "public_api.txt", {module: "\n".join(_described(module, names)) for module, names in PUBLIC.items()}
    )


def test_every_public_name_is_in_the_documents() -> None:
    page = (ROOT / "docs" / "extending.md").read_text()
    for module, names in PUBLIC.items():
        assert module in page or module == "fractional_gpu.gpu.open", module
        for name in names or ():
            assert name in page or name == "DeviceKind", name
