"""Finding and reading `jupyter_gpu_config.py`.

- Without an explicit file, every file of that name along Jupyter's configuration path is read, the system's first and the
  user's last, so that the user's wins. An explicit file is the only one, and it must be there.
- A setting that is in no file has its default; the command line wins over the files.
- An unknown class or setting is an error with a suggestion; traitlets would only warn.
- A configuration is a program: a file that every user may write to is not run.
"""

import stat
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jupyter_core.paths import jupyter_config_path
from traitlets import TraitError
from traitlets.config.loader import Config, LazyConfigValue, PyFileConfigLoader

from fractional_gpu.config.keys import ConfigError, config_error, did_you_mean
from fractional_gpu.config.settings import Settings, translate
from fractional_gpu.config.traits import GPUBroker

__all__ = ["CONFIG_NAME", "load"]

CONFIG_NAME = "jupyter_gpu_config.py"
_SECTION = GPUBroker.__name__


def load(
    config_file: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    origin: str = "the command line",
) -> Settings:
    """Return the settings from the files and from `overrides` (names of traits; None: not given), which come from `origin`.

    Raises ConfigError that names the file, the line or key, the value and what is allowed.
    """
    files = _search() if config_file is None else (Path(config_file).absolute(),)
    traits, source = GPUBroker(), dict[str, str]()
    for file in files:
        _apply(traits, source, _read(file), str(file))
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    _apply(traits, source, given, origin)
    return translate(traits, lambda name: _where(source.get(name), name), files)


def _where(source: str | None, name: str) -> str:
    return f"{source}: c.{_SECTION}.{name}" if source else f"c.{_SECTION}.{name}"


def _search() -> tuple[Path, ...]:
    """Return the files along Jupyter's path, least important first."""
    candidates = dict.fromkeys(Path(folder) / CONFIG_NAME for folder in reversed(jupyter_config_path()))
    return tuple(file for file in candidates if _is_there(file))


def _is_there(file: Path) -> bool:
    """Return whether the file exists. Ignore a folder without permission, as Jupyter does."""
    try:
        return file.exists()
    except PermissionError:
        return False


def _read(file: Path) -> Mapping[str, Any]:
    """Run the file and return what it set of GPUBroker. Raises ConfigError with the line that failed."""
    try:
        mode = file.stat().st_mode
    except OSError as error:
        raise ConfigError(f"the configuration file {file} cannot be read: {error.strerror}; check its path") from error
    if not stat.S_ISREG(mode):
        raise ConfigError(f"the configuration file {file} is not a regular file; check its path")
    if mode & stat.S_IWOTH:
        raise ConfigError(
            f"the configuration file {file} can be written by every user, so it is not run; chmod o-w {file}"
        )
    try:
        config: Config = PyFileConfigLoader(file.name, path=str(file.absolute().parent)).load_config()
    except SyntaxError as error:
        raise ConfigError(f"{error.filename or file}, line {error.lineno}: {error.msg}") from error
    except Exception as error:  # the file is a program: it may raise anything
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if Path(frame.filename).name == file.name
        ]
        line = f", line {lines[-1]}" if lines else ""
        raise ConfigError(f"{file}{line}: {type(error).__name__}: {error}") from error
    for section in config:
        if section != _SECTION:
            raise ConfigError(f"{file}: c.{section} is unknown here; {did_you_mean(section, [_SECTION])}")
    section_config: Mapping[str, Any] = config[_SECTION]
    return section_config


def _apply(traits: GPUBroker, source: dict[str, str], given: Mapping[str, Any], origin: str) -> None:
    """Set the given values. Raises ConfigError for an unknown name or a value of the wrong type."""
    known = GPUBroker.class_traits(config=True)
    for name, raw in given.items():
        where = _where(origin, name)
        if name not in known:
            raise ConfigError(f"{where} is unknown; {did_you_mean(name, known)}")
        value = raw.get_value(getattr(traits, name)) if isinstance(raw, LazyConfigValue) else raw
        try:
            setattr(traits, name, value)
        except TraitError:
            example = known[name].metadata.get("example")
            raise config_error(where, value, f"expected {known[name].info()}, for example {example!r}") from None
        source[name] = origin
