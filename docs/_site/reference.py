"""The pages of the reference that are made from the code: commands from their parsers, settings from their help."""

import argparse
import re
from collections.abc import Iterator

from traitlets import Undefined
from traitlets.config import Configurable

from fractional_gpu.commands.main import COMMANDS, subcommand
from fractional_gpu.config.traits import GPUBroker
from fractional_gpu_hub.base import GPUChoiceMixin
from fractional_gpu_hub.engines import EngineGPUMixin
from fractional_gpu_hub.engines.kubernetes import FractionalGPUKubeSpawner
from fractional_gpu_hub.engines.slurm import FractionalGPUSlurmSpawner
from fractional_gpu_hub.mixin import FractionalGPUMixin


def commands() -> str:
    """Return the page of all commands, with the options of each."""
    parts = [
        "# Every command and option\n",
        "From the commands' own help; [commands.md](../commands.md) is the overview.\n",
    ]
    for name, entry in COMMANDS.items():
        parser = subcommand(name)[1]
        parts += [f"## jupyter gpu {name}\n", f"{_sentence(entry.summary)}\n", *_parser(parser)]
    return "\n".join(parts)


def _parser(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield f"```text\n{_usage(parser)}\n```\n"
    if parser.description:
        yield f"{parser.description.strip()}\n"
    rows: list[tuple[str, str]] = []
    inner: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to ask
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            inner = dict(action.choices)
        elif action.help is not argparse.SUPPRESS and not isinstance(action, argparse._HelpAction):  # noqa: SLF001
            rows.append((_name(action), _help(action)))
    if rows:
        yield "| argument | what it does |\n|---|---|"
        yield "\n".join(f"| `{_cell(name)}` | {_cell(text)} |" for name, text in rows) + "\n"
    for word, sub in inner.items():
        yield f"### {parser.prog} {word}\n"
        yield from _parser(sub)
    if parser.epilog:
        yield f"```text\n{parser.epilog.strip()}\n```\n"


def _usage(parser: argparse.ArgumentParser) -> str:
    return re.sub(r"\s+", " ", parser.format_usage()).removeprefix("usage: ").strip()


def _name(action: argparse.Action) -> str:
    choices = "|".join(map(str, action.choices or ()))
    value = "" if action.nargs == 0 else str(action.metavar or choices or action.dest.upper())
    return f"{', '.join(action.option_strings)} {value}".strip()


def _help(action: argparse.Action) -> str:
    text = action.help or ""
    return _sentence(
        text % {"default": action.default, "prog": "jupyter gpu"} if "%(" in text else text.replace("%%", "%")
    )


def _sentence(text: str) -> str:
    text = text.strip()
    return f"{text[:1].upper()}{text[1:]}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def settings() -> str:
    """Return the page of all settings: the broker's, and the hub's spawners'."""
    parts = [
        "# Every setting\n",
        "Types, defaults and help of the traits. [policies.md](../policies.md) has the keys of a pool.\n",
    ]
    for title, kind in (
        ("The broker, in `jupyter_gpu_config.py`", GPUBroker),
        ("All spawners, in `jupyterhub_config.py`", GPUChoiceMixin),
        ("Spawners of one machine", FractionalGPUMixin),
        ("Spawners of a cluster's engine", EngineGPUMixin),
        ("Slurm's spawner", FractionalGPUSlurmSpawner),
        ("Kubernetes' spawner", FractionalGPUKubeSpawner),
    ):
        parts += [f"## {title}\n", *_traits(kind)]
    return "\n".join(parts)


def _traits(kind: type[Configurable]) -> Iterator[str]:
    inherited = {
        name
        for base in kind.__mro__[1:]
        if issubclass(base, Configurable)
        for name in base.class_own_traits(config=True)
    }
    for name, trait in sorted(kind.class_own_traits(config=True).items()):
        if name in inherited:
            continue
        default = trait.default_value_repr() if trait.default_value is not Undefined else "computed"
        yield f"### c.{kind.__name__}.{name}\n"
        yield f"{type(trait).__name__}; default: `{default}`\n"
        yield f"{_paragraphs(trait.help)}\n"


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.strip().split("\n\n"))
