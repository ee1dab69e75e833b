"""The figures of a run on hardware, for documents, and the one way into the repository for its results.

    python tests/gpu/figures.py FOLDER [FOLDER ...]            prints them; the folders are those of run_all.py, one for each part
    python tests/gpu/figures.py FOLDER [FOLDER ...] --record   and writes tests/gpu/recorded/DEVICE-DRIVER.json
    python tests/gpu/figures.py tests/gpu/recorded/FILE        prints what was recorded

Every table names device and driver. Results of a simulated device or of a double of the driver are printed and never recorded.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

_HERE = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_HERE), *(str(_HERE / folder) for folder in ("provisioner", "kernelext", "hub_spawner"))]

from tests.gpu.facts import described, facts

__all__ = ["RECORDED", "figures", "main", "together"]

RECORDED: Final = Path(__file__).with_name("recorded")
_ITEMS: Final = ("questions", "measures", "spoilers")
_TESTS: Final = ("tests", "torch", "managed")


class ResultsError(Exception):
    """The results cannot be read, or do not belong together; the sentence says why."""


def together(paths: Sequence[Path]) -> dict[str, Any]:
    """Return the results of several parts of one run as one. Raises ResultsError."""
    merged: dict[str, Any] = {}
    for path in paths:
        file = path / "results.json" if path.is_dir() else path
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ResultsError(f"{file} cannot be read: {error}") from error
        if not isinstance(found, dict) or "machine" not in found:
            raise ResultsError(f"{file} is not a results.json of tests/gpu/run_all.py: it names no machine")
        if merged and _where(found) != _where(merged):
            raise ResultsError(
                f"{file} is of {_where(found)}, the others are of {_where(merged)}: give the parts of one run"
            )
        steps = {**merged.get("steps", {}), **found.get("steps", {})}
        merged = {**merged, **found, "machine": merged.get("machine", found["machine"]), "steps": steps}
    return merged


def _where(found: Mapping[str, Any]) -> str:
    machine = found["machine"]
    devices = machine.get("devices") or [{"name": "no device"}]
    return f"{devices[0]['name']}, driver {machine.get('driver', 'none')}"


def figures(found: Mapping[str, Any]) -> str:
    """Return the figures as markdown."""
    lines = [f"Measured on {described(found['machine'])}."]
    lines += _phases(found)
    lines += _offload(found)
    for step in _ITEMS:
        items = found.get(step, {}).get("items", {})
        told = [line for name, row in items.items() for line in _item(name, row)]
        if told:
            lines += ["", f"| {step} | | |", "| --- | --- | --- |", *told]
    lines += _tests(found)
    return "\n".join(lines) + "\n"


def _phases(found: Mapping[str, Any]) -> Iterator[str]:
    rows = [("", found.get("phases", {})), (", small pages", found.get("small-pages", {}))]
    if not any(part for _, part in rows):
        return
    yield from (
        "",
        "| held | moved | suspend | resume | of that, checkpoint and restore |",
        "| --- | --- | --- | --- | --- |",
    )
    for note, part in rows:
        phases = part.get("phases", {})
        for row in phases.get("sizes", []):
            if "not_measured" in row:
                yield f"| {row['held_mib']} MiB{note} | {row['not_measured']} | | | |"
                continue
            shrunk = ", shrunk before" if row["shrinking"] else ""
            yield (
                f"| {row['held_mib']} MiB{note}{shrunk} | {row['moved_mib']} MiB "
                f"| {row['suspend_s']:.2f} s, {row['suspend_gb_per_s']} GB/s | {row['resume_s']:.2f} s, {row['resume_gb_per_s']} GB/s "
                f"| {row['phases_s']['checkpoint']:.2f} s, {row['phases_s']['restore']:.2f} s |"
            )
    for note, part in rows:
        phases = part.get("phases", {})
        if phases:
            copies = phases["pinned_copies_gb_per_s"]
            yield ""
            yield (
                f"Pinned copies in the same run{note}: {copies['to_device']} GB/s to the device, {copies['to_host']} GB/s to the host; "
                f"transparent huge pages: {phases['thp']}."
            )


def _offload(found: Mapping[str, Any]) -> Iterator[str]:
    items = found.get("offload", {}).get("items", {})
    if not items:
        return
    yield from ("", "| offload probe | out | back | every byte |", "| --- | --- | --- | --- |")
    for name, row in items.items():
        saw = row.get("saw", {})
        if name.startswith("native") and "steps" in saw:
            out, back = (saw["steps"].get(step) for step in ("checkpoint", "restore"))
            yield f"| {name} | {_speed(out)} | {_speed(back)} | {_intact(saw)} |"
            for way, one in saw.get("pinned copies", {}).items():
                yield f"| pinned copies {way.replace('_', ' ')} | {_speed(one)} | | |"
        rounds = {what: one for what, one in saw.items() if "round" in what}
        if not rounds and not name.startswith("native"):
            yield f"| {name} | {row['outcome']}: {row.get('why', '')} | | |"
        for what, one in rounds.items():
            if "refused" in one:
                yield f"| {name}, {what} | refused at {', '.join(one['refused'])} | | |"
            else:
                yield f"| {name}, {what} | {_speed(one['out'])} | {_speed(one['back'])} | {_intact(one)} |"


def _speed(row: Mapping[str, float] | None) -> str:
    return "-" if row is None else f"{row['seconds']} s, {row['gb_per_s']} GB/s"


def _intact(saw: Mapping[str, Any]) -> str:
    return {True: "intact", False: "CHANGED", None: "not compared"}[saw.get("intact")]


def _item(name: str, row: Mapping[str, Any]) -> Iterator[str]:
    if row["outcome"] != "answered":
        yield f"| {name} | {row['outcome']} | {_cell(row.get('why', ''))} |"
    if row["outcome"] != "not here":
        for what, answer in facts(name, row.get("saw", {})):
            yield f"| {name} | {what} | {_cell(answer)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _tests(found: Mapping[str, Any]) -> Iterator[str]:
    tests = [(name, one) for step in _TESTS for name, one in found.get(step, {}).get("tests", {}).items()]
    if not tests:
        return
    yield from ("", "| test | outcome | what was seen |", "| --- | --- | --- |")
    for name, one in tests:
        yield f"| {name} | {one.get('outcome', 'did not end')} | {_cell(json.dumps(one['saw']))} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures; 1 where there are none to be had, 2 for arguments that are not understood."""
    parser = argparse.ArgumentParser(description="The figures of a run on hardware, as markdown.")
    parser.add_argument("results", nargs="+", type=Path, help="folders of run_all.py, or a recorded file")
    parser.add_argument("--record", action="store_true", help="keep the results in tests/gpu/recorded")
    options = parser.parse_args(arguments)
    try:
        found = together(options.results)
        if options.record:
            sys.stderr.write(f"written to {_record(found)}\n")
    except ResultsError as error:
        sys.stderr.write(f"figures: {error}\n")
        return 1
    sys.stdout.write(figures(found))
    return 0


def _record(found: Mapping[str, Any]) -> Path:
    machine = found["machine"]
    if machine.get("simulated") or machine.get("double") or not machine.get("devices"):
        raise ResultsError(f"only what a GPU has shown is recorded, and this is {described(machine)}")
    name = re.sub(r"[^a-z0-9.]+", "-", f"{machine['devices'][0]['name']}-{machine['driver']}".lower())
    RECORDED.mkdir(exist_ok=True)
    path = RECORDED / f"{name}.json"
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    raise SystemExit(main())
