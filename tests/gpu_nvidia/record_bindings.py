"""What cuda.bindings.driver has of what this project uses: python -m tests.gpu_nvidia.record_bindings

Run it where another version of cuda-bindings is installed (no driver is needed): it adds that version to bindings.json, against which the
double is tested. The bindings are no dependency of the tests, because of their size and since none of their calls works without a driver.
"""

import importlib
import inspect
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.gpu_nvidia.fake_driver import FakeDriver, Result

__all__ = ["RECORD", "calls_of", "classes_of"]

RECORD = Path(__file__).with_name("bindings.json")
PROBE_CALLS = (
    "cuCtxSetCurrent",
    "cuDevicePrimaryCtxRetain",
    "cuMemAlloc",
    "cuMemsetD32",
    "cuCtxSynchronize",
    "cuMemcpyDtoH",
)


def calls_of(double: type) -> dict[str, int]:
    """Return the driver's calls that a class has, with the number of their arguments."""
    names = [name for name in dir(double) if name.startswith("cu") and callable(getattr(double, name))]
    return {name: len(inspect.signature(getattr(double, name)).parameters) for name in names}


def classes_of(double: type) -> list[str]:
    """Return the driver's classes that a class has."""
    return [name for name in dir(double) if name.startswith("CUcheckpoint")]


def _seen(driver: Any) -> dict[str, Any]:  # noqa: ANN401 - the bindings have no types
    calls = [name for name in (*calls_of(FakeDriver), *PROBE_CALLS) if hasattr(driver, name)]
    classes = {name: getattr(driver, name)() for name in classes_of(FakeDriver) if hasattr(driver, name)}
    return {
        "calls": {name: len(inspect.signature(getattr(driver, name)).parameters) for name in calls},
        "attributes": {
            name: [one for one in dir(made) if not one.startswith(("_", "reserved")) and one != "getPtr"]
            for name, made in classes.items()
        },
        "results": {one.name: int(getattr(driver.CUresult, one.name)) for one in Result},
        "states": {one.name: int(one) for one in driver.CUprocessState},
    }


def main() -> int:
    """Add the installed version; 1 where there is none."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        sys.stderr.write(f"cuda-bindings is needed here ({error}): pip install cuda-bindings\n")
        return 1
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    version = metadata.version("cuda-bindings")
    record[version] = _seen(driver)
    RECORD.write_text(json.dumps(dict(sorted(record.items())), indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"recorded {version}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
