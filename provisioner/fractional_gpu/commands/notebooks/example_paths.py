"""Where the example notebooks lie: in the package when it was installed from a wheel, beside it in a checkout."""

from pathlib import Path

from fractional_gpu.commands.terminal.failure import CommandError

__all__ = ["EXAMPLES", "examples_dir"]

EXAMPLES = ("tenant-a.ipynb", "tenant-b.ipynb", "device.py")
"""The files of the demonstration."""


def examples_dir() -> Path:
    """Return the folder of the example notebooks. Raises CommandError where the installation lacks them."""
    here = Path(__file__).resolve().parent
    candidates = (here / "examples", here.parents[3] / "examples")
    for folder in candidates:
        if all((folder / name).is_file() for name in EXAMPLES):
            return folder
    looked = " and ".join(str(folder) for folder in candidates)
    raise CommandError(f"the example notebooks are missing (looked in {looked}); install jupyter-fractional-gpu again")
