"""The pages of the reference that are made from the code: parsers of commands, help of settings, classes of errors and events."""

import argparse
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, TypeVar

from traitlets import Undefined
from traitlets.config import Configurable

from fractional_gpu.commands.main import COMMANDS, subcommand
from fractional_gpu.config import POOL_KEYS, SETTINGS
from fractional_gpu.config.values import Setting
from fractional_gpu.core import effects as core_effects
from fractional_gpu.core import events as core_events
from fractional_gpu.protocol import errors as protocol_errors
from fractional_gpu_hub.base import GPUChoiceMixin
from fractional_gpu_hub.engines import EngineGPUMixin
from fractional_gpu_hub.engines.kubernetes import FractionalGPUKubeSpawner
from fractional_gpu_hub.engines.slurm import FractionalGPUSlurmSpawner
from fractional_gpu_hub.mixin import FractionalGPUMixin

T = TypeVar("T")


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
    words = re.sub(r"\s+", " ", parser.format_usage()).removeprefix("usage: ").strip()
    return textwrap.fill(words, 72, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


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
    parts += ["## The broker, in `jupyter_gpu_config.py`\n", *_settings(SETTINGS, "c.GPUBroker.")]
    for title, kind in (
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


def pools() -> str:
    """Return the page of all keys of a pool, from the table that parses them."""
    parts = [
        "# Every key of a pool\n",
        "`c.GPUBroker.pools = {'NAME': {KEY: VALUE}}`. [policies.md](../policies.md) says what the keys are for.\n",
    ]
    for title, of_arbiter in (("Kernels and devices", True), ("On a hub", False)):
        keys = {name: key for name, key in POOL_KEYS.items() if bool(key.to) is of_arbiter}
        parts += [f"## {title}\n", *_settings(keys, "")]
    return "\n".join(parts)


def _settings(settings: Mapping[str, Setting[Any]], before: str) -> Iterator[str]:
    for name, setting in settings.items():
        yield f"### {before}{name}\n"
        yield f"Default: `{json.dumps(setting.default_value)}`; example: `{json.dumps(setting.example)}`\n"
        yield f"{_paragraphs(setting.help)}\n"


def errors() -> str:
    """Return the page of all error codes."""
    kinds = [kind for _, kind in _classes(protocol_errors, protocol_errors.FractionalGPUError)]
    rows = [f"| `{kind.code}`, {kind.status} | `{kind.__name__}` | {_cell(_doc(kind))} |" for kind in kinds]
    parts = [
        "# Every error code\n",
        (
            'A refusal of the broker is `{"error": {"code", "reason", "message"}}` with an HTTP status. The message is for people; a '
            "program goes by the code, and by the reason where it refines the code. In Python they are classes of "
            "`fractional_gpu.protocol.errors`.\n"
        ),
        "| code, status | class | meaning |\n|---|---|---|",
        *rows,
        "\n[limits.md](../limits.md) has each limit with its answer, [routes.md](../routes.md) who may ask what.\n",
    ]
    return "\n".join(parts)


def events() -> str:
    """Return the page of the arbiter's events and effects."""
    parts = [
        "# Every event and effect\n",
        "The arbiter is one function from an event to a list of effects, without a clock. A recorded log has these names and fields.\n",
    ]
    for title, module, base in (
        ("Events: what can happen", core_events, core_events.Event),
        ("Effects: what the arbiter asks for", core_effects, core_effects.Effect),
    ):
        parts += [f"## {title}\n", "| name | meaning, and fields |\n|---|---|"]
        for name, kind in _classes(module, base):
            fields = ", ".join(f"`{field}`" for field in inspect.signature(kind).parameters if field != "at_ms")
            parts.append(f"| `{name}` | {_cell(_doc(kind))} {f'Fields: {fields}.' if fields else ''} |")
        parts.append("")
    return "\n".join(parts)


def _classes(module: ModuleType, base: type[T]) -> list[tuple[str, type[T]]]:
    """Return the module's own subclasses, in the order of the source."""
    found = [
        (name, kind)
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, base) and kind is not base and kind.__module__ == module.__name__
    ]
    return sorted(found, key=lambda pair: inspect.getsourcelines(pair[1])[1])


def _doc(kind: type) -> str:
    """Return the class's documentation in one line; a dataclass without any has its signature there."""
    text = " ".join((inspect.getdoc(kind) or "").split())
    return "" if text.startswith(f"{kind.__name__}(") else text


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.strip().split("\n\n"))
