"""What a run saw, as short answers for people. Standard library only."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

__all__ = ["described", "facts"]

Saw = Mapping[str, Any]
Fact = tuple[str, str]

_STATES: Final = {0: "running", 1: "locked", 2: "checkpointed", 3: "failed", 4: "checkpointing", 5: "restoring"}
_PHASES: Final = ("lock", "checkpoint", "restore", "unlock")
_MOST: Final = 160


def facts(item: str, saw: Saw) -> list[Fact]:
    """Return questions with their answers. An item without prepared sentences reports all that it saw, formatted by type."""
    tell = _TELL.get(item, _everything)
    found: list[Fact] = []
    try:
        for what, answer in tell(saw):
            found.append((what, answer[:_MOST]))
    except (KeyError, TypeError, AttributeError, IndexError) as error:  # it ended before it had seen that
        found.append(("the rest", f"not seen ({type(error).__name__}: {error})"))
    return found


def described(machine: Mapping[str, Any]) -> str:
    """Return what a run was made on: device, driver and software, or that it says nothing about GPUs."""
    if "error" in machine:
        return f"the machine is not known: {machine['error']}"
    if machine["simulated"]:
        return "a simulated device: its times say nothing about GPUs"
    if machine.get("double"):
        return f"a double of driver {machine['driver']}: its times say nothing about GPUs"
    names = ", ".join(one["name"] for one in machine["devices"])
    torch = f", torch {machine['torch']}" if "torch" in machine else ""
    return f"{names}, driver {machine['driver']}, Linux {machine['kernel']}{torch}, {machine['at'][:10]}"


# ---- words for answers -------------------------------------------------------------------------------------------------------


def _call(answer: Any) -> str:  # noqa: ANN401 - an answer of caller.py, or a sentence where there was none
    if not isinstance(answer, Mapping):
        return str(answer)
    return f"ok in {answer['seconds']:.3f} s" if answer["result"] == 0 else f"{answer['name']} ({answer['result']})"


def _state(answer: Any) -> str:  # noqa: ANN401 - as above
    if not isinstance(answer, Mapping) or answer["result"] != 0:
        return _call(answer)
    return str(_STATES.get(answer["value"], answer["value"]))


def _cycle(answers: Any) -> str:  # noqa: ANN401 - as above, by phase
    if not isinstance(answers, Mapping):
        return str(answers)
    wrong = [phase for phase in _PHASES if phase in answers and answers[phase]["result"] != 0]
    if not wrong and all(phase in answers for phase in _PHASES):
        return "whole cycle ok, " + ", ".join(f"{phase} {answers[phase]['seconds']:.3f} s" for phase in _PHASES)
    after = answers["unlock"] if "unlock" in answers and "unlock" not in wrong else None
    state = f", unlocked and {_STATES.get(after['state_after'], after['state_after'])}" if after is not None else ""
    return "; ".join(f"{phase} {_call(answers[phase])}" for phase in wrong) + state


def _listed(entry: Any) -> str:  # noqa: ANN401 - an entry of look.sees
    if entry is None:
        return "not listed"
    return "listed without its bytes" if entry["mib"] is None else f"listed as {entry['list']} with {entry['mib']} MiB"


def _process(told: Mapping[str, Any]) -> str:
    thread = told["thread"]
    number = thread["value"] if thread["result"] == 0 else _call(thread)
    return f"{_state(told['state'])}, restore thread {number}, NVML: {_listed(told['nvml'])}"


def _said(value: Any) -> str:  # noqa: ANN401 - whatever an item saw
    if not isinstance(value, Mapping):
        return str(value)
    if value.keys() >= {"state", "thread", "nvml"}:
        return _process(value)
    if "lock" in value:
        return _cycle(value)
    if "result" in value:
        return _call(value) if value.get("value") is None else _state(value)
    return ", ".join(f"{key} {one}" for key, one in value.items()) or "ok"


def _everything(saw: Saw) -> Iterator[Fact]:
    for name, value in saw.items():
        yield name, _said(value)


# ---- the items ---------------------------------------------------------------------------------------------------------------


def _plain(saw: Saw) -> Iterator[Fact]:
    yield "process", _process(saw["process"])
    yield "cycle", ", ".join(f"{phase} {_call(saw[phase])}" for phase in _PHASES)
    yield (
        "while saved",
        f"{_process(saw['saved'])}; device {saw['device_mib']} MiB, saved {saw['saved']['device_mib']} MiB",
    )
    before, saved = saw["host_before_mib"], saw["host_saved_mib"]
    grown = {
        name: round(saved[name] - before[name], 1)
        for name in before
        if name != "cgroup" and saved[name] != before[name]
    }
    yield f"host memory for {saw['held_mib']} MiB, MiB more", str(grown)
    yield "its memory", "intact" if saw["intact"] else "CHANGED"


def _kinds(saw: Saw) -> Iterator[Fact]:
    for name in saw:
        if name.endswith("beside plain") and not name.startswith("plain"):
            yield name, str(saw[name])


def _nvml(saw: Saw) -> Iterator[Fact]:
    for name in ("devices", "use", "activity", "sensors"):
        yield f"{name}, ms", f"median {saw[name]['median_ms']}, worst {saw[name]['worst_ms']}"


def _margin(saw: Saw) -> Iterator[Fact]:
    for name, value in saw.items():
        if name.startswith("margin"):
            yield name, str(value)


def _killed(saw: Saw) -> Iterator[Fact]:
    for name, value in saw.items():
        if name.startswith("killed at"):
            states = [one["state"] for one in value.get("states", ())]
            words = " -> ".join(str(_STATES.get(state, state)) for state in states)
            recovery = ", ".join(
                f"{call} {_call(one)}" for call, one in value.get("recovery", {}).items() if call != "state"
            )
            ended = f"; ended by {value['ended by']}" if "ended by" in value else ""
            yield (
                name,
                f"{words}; {recovery or 'nothing to bring back'}; intact: {value.get('intact', 'not asked')}{ended}",
            )
    yield "neighbour intact", str(saw["neighbour intact"])


_TELL: Final[Mapping[str, Callable[[Saw], Iterator[Fact]]]] = {
    "plain": _plain,
    "kinds-of-memory": _kinds,
    "nvml-times": _nvml,
    "margin": _margin,
    "killed-in-checkpoint": _killed,
    "killed-in-restore": _killed,
}
