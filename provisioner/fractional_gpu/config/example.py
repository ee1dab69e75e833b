"""Generates an example configuration file from the help of the settings, so that it always matches them.

As in other files that Jupyter generates, `## ` begins help and `# ` begins a disabled setting.
"""

import json
import textwrap
from typing import Any

from fractional_gpu.config.pools import ALL_KEYS
from fractional_gpu.config.traits import GPUBroker

__all__ = ["example_config"]

_WIDTH = 100
_HEAD = """\
# Configuration of the broker that shares the GPUs of this machine among Jupyter kernels.
# Put it as jupyter_gpu_config.py into a folder that `jupyter --paths` lists under "config", or name it with --config.
# Sizes are written like 20GiB, durations like 30s, 5m or 2h, fractions of a GPU like 1/4, 0.25 or 250m.

c = get_config()  # noqa
"""


def example_config() -> str:
    """Return the text of a file in which every setting is explained and commented out."""
    parts = [_HEAD]
    for name, trait in sorted(GPUBroker.class_traits(config=True).items()):
        parts.append(_pools(trait.help) if name == "pools" else _setting(name, trait))
    return "\n".join(parts)


def _setting(name: str, trait: Any) -> str:  # noqa: ANN401 -- traitlets' traits are generic in what they hold
    default = f"Default: {_literal(trait.default())}"
    return f"{_comment(trait.help)}## {default}\n# c.GPUBroker.{name} = {_literal(trait.metadata['example'])}\n"


def _pools(text: str) -> str:
    lines = [_comment(text) + "# c.GPUBroker.pools = {", '#     "default": {']
    for key, rule in ALL_KEYS.items():
        lines += textwrap.wrap(rule.help, _WIDTH, initial_indent="##         ", subsequent_indent="##         ")
        lines.append(f'#         "{key}": {_literal(rule.default)},  # or {_literal(rule.example)}')
    return "\n".join([*lines, "#     },", "# }"]) + "\n"


def _comment(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), _WIDTH, initial_indent="## ", subsequent_indent="## ") + "\n"


def _literal(value: object) -> str:
    """Return Python source, with double quotes as in the rest of the file."""
    return repr(value) if value is None or isinstance(value, bool) else json.dumps(value)
