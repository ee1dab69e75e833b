"""Autograde an assignment with nbgrader while another kernel has the GPU for longer than nbgrader gives a cell; print the points, of 5.

Run in a course's folder by the environment's interpreter. `nbgrader_config.py` is what docs/teaching.md says. Arguments: the program
`jupyter-gpu`, the name of the kernel with the whole GPU, a cell that uses the GPU, and one that checks what it put there.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from time import monotonic

from jupyter_client.manager import start_new_kernel
from nbgrader.api import Gradebook

_CELL_S = 30
"""What nbgrader gives a cell."""


def main(command: str, whole: str, use: str, check: str) -> None:
    _make_course(use, check)
    manager, client = start_new_kernel(kernel_name=whole, startup_timeout=300)
    try:
        for code in (use, "%gpu pin 10m"):
            reply = client.execute_interactive(code, timeout=300, output_hook=lambda _: None)["content"]
            assert reply["status"] == "ok", reply
        grading = subprocess.Popen(["nbgrader", "autograde", "ps1"], stdout=sys.stderr)
        began = None
        while grading.poll() is None and (began is None or monotonic() - began < _CELL_S + 5):
            if began is None and _is_waiting(command):
                began = monotonic()
        assert began is not None
        assert grading.poll() is None, "it did not wait for the GPU"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert grading.wait(300) == 0
    with Gradebook("sqlite:///gradebook.db") as gradebook:
        print(gradebook.find_submission("ps1", "ada").score)


def _is_waiting(command: str) -> bool:
    done = subprocess.run([command, "status", "--json"], check=True, capture_output=True, text=True)
    return any(lease["position"] is not None for lease in json.loads(done.stdout)["leases"])


def _make_course(use: str, check: str) -> None:
    source, handed_in = Path("source/ps1/gpu.ipynb"), Path("submitted/ada/ps1/gpu.ipynb")
    source.parent.mkdir(parents=True)
    cells = [
        _cell(f"### BEGIN SOLUTION\n{use}\n### END SOLUTION", "use", solution=True),
        _cell(check, "check", grade=True, locked=True, points=5),
    ]
    source.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}))
    subprocess.run(["nbgrader", "generate_assignment", "ps1"], check=True, stdout=sys.stderr)
    shutil.copytree("release/ps1", handed_in.parent)
    notebook = json.loads(handed_in.read_text())
    notebook["cells"][0]["source"] = use
    handed_in.write_text(json.dumps(notebook))


def _cell(text: str, name: str, **about: object) -> object:
    kinds = {"schema_version": 3, "grade_id": name, "task": False, "grade": False, "solution": False, "locked": False}
    plain: dict[str, object] = {"cell_type": "code", "id": name, "source": text, "outputs": [], "execution_count": None}
    return plain | {"metadata": {"nbgrader": kinds | about}}


if __name__ == "__main__":
    main(*sys.argv[1:])
