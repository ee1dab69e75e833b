"""One target under the fuzzer: `python -m tests.fuzz.child TARGET LIBFUZZER-ARGUMENTS`. Started by tests/fuzz/fuzz.py."""

import sys

import atheris

with atheris.instrument_imports(include=["fractional_gpu", "fractional_gpu_kernel", "json"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    """Fuzz until libFuzzer ends the process."""
    name, *arguments = sys.argv[1:]
    atheris.Setup([sys.argv[0], *arguments], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
