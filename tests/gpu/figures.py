"""The figures of a run on hardware, for documents, and the one way into the repository for its results.

    python tests/gpu/figures.py FOLDER [FOLDER ...]            prints them; the folders come from run_all.py, one for each part
    python tests/gpu/figures.py FOLDER [FOLDER ...] --record   and writes tests/gpu/recorded/DEVICE-DRIVER.json, and a row of docs/nvidia.md
    python tests/gpu/figures.py tests/gpu/recorded/FILE        prints what was recorded

Every table names device and driver. Results of a simulated device or of a double of the driver are printed and never recorded.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

_HERE = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_HERE), *(str(_HERE / folder) for folder in ("provisioner", "kernelext", "hub_spawner"))]

from tests.gpu.facts import described, facts
from tests.support.paths import ROOT

__all__ = ["RECORDED", "figures", "main", "table", "together"]

RECORDED: Final = Path(__file__).with_name("recorded")
_NVIDIA: Final = ROOT / "docs" / "nvidia.md"
_SEEN_ON: Final = "| driver | device | seen |\n| --- | --- | --- |\n"
Row = tuple[str, ...]


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
    for step in found["steps"]:
        lines += table(step, found.get(step, {}))
    return "\n".join(lines) + "\n"


def table(step: str, saw: Mapping[str, Any]) -> list[str]:
    """Return what a step saw as a markdown table; a sentence if its results are not whole."""
    tell = _phases if "phases" in saw else _tests if "tests" in saw else _offload if step == "offload" else _items
    try:
        rows = list(tell(saw))
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        rows = [(f"what it saw is in results.json ({type(error).__name__}: {error})",)]
    if not rows:
        return []
    columns = max(len(row) for row in rows)
    head = (step, *("" for _ in range(columns - 1)))
    whole = [head, ("---",) * columns, *((*row, *("" for _ in range(columns - len(row)))) for row in rows)]
    return ["", *(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in whole)]


def _phases(saw: Mapping[str, Any]) -> Iterator[Row]:
    phases = saw["phases"]
    copies = phases["pinned_copies_gb_per_s"]
    yield (
        f"pinned copies, huge pages: {phases['thp']}",
        "",
        f"{copies['to_host']} GB/s to the host",
        f"{copies['to_device']} GB/s back",
    )
    for row in phases["sizes"]:
        if "not_measured" in row:
            yield f"{row['held_mib']} MiB", row["not_measured"]
            continue
        yield (
            f"{row['held_mib']} MiB{', shrunk before' if row['shrinking'] else ''}",
            f"{row['moved_mib']} MiB moved",
            f"suspend {row['suspend_s']:.2f} s, {row['suspend_gb_per_s']} GB/s",
            f"resume {row['resume_s']:.2f} s, {row['resume_gb_per_s']} GB/s",
            f"checkpoint {row['phases_s']['checkpoint']:.2f} s, restore {row['phases_s']['restore']:.2f} s",
        )


def _offload(saw: Mapping[str, Any]) -> Iterator[Row]:
    for name, row in saw.get("items", {}).items():
        seen = row.get("saw", {})
        yield name, row["outcome"], row.get("why", "")
        for way, one in seen.get("pinned copies", {}).items():
            yield "", f"pinned copies {way.replace('_', ' ')}", _speed(one)
        if name.startswith("native") and "steps" in seen:
            speeds = [
                f"{step} {_speed(seen['steps'][step])}" for step in ("checkpoint", "restore") if step in seen["steps"]
            ]
            yield "", "the driver's own", ", ".join([*speeds, _intact(seen)])
        for what, one in seen.items():
            if "round" in what and "refused" in one:
                yield "", what, f"refused at {', '.join(one['refused'])}"
            elif "round" in what:
                yield "", what, f"out {_speed(one['out'])}, back {_speed(one['back'])}, {_intact(one)}"


def _speed(row: Mapping[str, float]) -> str:
    return f"{row['seconds']} s ({row['gb_per_s']} GB/s)"


def _intact(saw: Mapping[str, Any]) -> str:
    return {True: "intact", False: "CHANGED", None: "not compared"}[saw.get("intact")]


def _items(saw: Mapping[str, Any]) -> Iterator[Row]:
    for name, row in saw.get("items", {}).items():
        left = f", {row['left_mib']} MiB left on the device" if row.get("left_mib") else ""
        yield name, f"{row['outcome']}, {row['seconds']:.0f} s{left}", row.get("why", "")
        if row["outcome"] != "not here":
            yield from (("", what, answer) for what, answer in facts(name, row.get("saw", {})))


def _tests(saw: Mapping[str, Any]) -> Iterator[Row]:
    for name, one in saw["tests"].items():
        yield name, one.get("outcome", "did not end"), json.dumps(one["saw"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures; 1 if there are none, 2 for wrong arguments."""
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
    path.write_text(json.dumps(_condensed(found), indent=1) + "\n", encoding="utf-8")
    _see(found, path)
    return path


def _condensed(found: Any) -> Any:  # noqa: ANN401 - JSON
    """Return the results without what is of that one machine only; of the kernel's log, each message once, with how often it came."""
    if isinstance(found, list):
        return [_condensed(one) for one in found]
    if not isinstance(found, dict):
        return found
    kept = {key: _condensed(value) for key, value in found.items() if key not in ("log", "kernel_log", "path")}
    logs = found.get("kernel_log", {})
    lines = logs if isinstance(logs, list) else [line for one in logs.values() for line in one]
    if lines:
        kept["kernel_log"] = dict(Counter(re.sub(r"^<\d+>\[[^]]*\] |(?<=0x)[0-9a-f]+", "", one) for one in lines))
    return kept


def _see(found: Mapping[str, Any], path: Path) -> None:
    """Write the run's row of the table "Seen on", instead of an earlier one of this driver and device."""
    before, head, after = _NVIDIA.read_text(encoding="utf-8").partition(_SEEN_ON)
    rows, _, rest = after.partition("\n\n")
    key = f"| {found['machine']['driver']} | {found['machine']['devices'][0]['name']} |"
    items = {name: row for step in found["steps"] for name, row in found.get(step, {}).get("items", {}).items()}
    cycles = {name: row["saw"]["cycle"] for name, row in items.items() if "cycle" in row.get("saw", {})}
    whole = [
        name
        for name, one in cycles.items()
        if isinstance(one, dict) and not any(call["result"] for call in one.values())
    ]
    tests = [one for step in found["steps"] for one in found.get(step, {}).get("tests", {}).values()]
    passed = sum(one.get("outcome") == "passed" for one in tests)
    other = ", ".join(name for name in cycles if name not in whole) or "none"
    seen = f"saved and brought back: {', '.join(whole) or 'none'}; not: {other}; {passed} of {len(tests)} tests passed; {path.name}"
    kept = [row for row in rows.splitlines() if not row.startswith((key, "| none"))]
    _NVIDIA.write_text(before + head + "\n".join([*kept, f"{key} {seen} |"]) + "\n\n" + rest, encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
