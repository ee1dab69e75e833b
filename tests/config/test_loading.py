"""Files are found, read in order and never half understood."""

from collections.abc import Callable
from pathlib import Path

import pytest
from jupyter_core.paths import jupyter_config_path

from fractional_gpu.config import CONFIG_NAME, ConfigError, load
from fractional_gpu.config import settings as settings_module

Write = Callable[..., Path]


def test_the_path_is_jupyters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, write: Write) -> None:
    monkeypatch.setattr(settings_module, "jupyter_config_path", jupyter_config_path)
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(tmp_path))
    file = write("c.GPUBroker.idle_exit = '7m'")
    settings = load()
    assert file in settings.files
    assert settings.idle_exit == 420_000


def test_the_users_file_wins_over_the_systems_setting_by_setting(write: Write, config_path: tuple[Path, Path]) -> None:
    user, system = config_path
    write("c.GPUBroker.idle_exit = '1m'\nc.GPUBroker.log_level = 'debug'", system)
    write("c.GPUBroker.idle_exit = '2m'", user)
    settings = load()
    assert settings.files == (system / CONFIG_NAME, user / CONFIG_NAME)
    assert (settings.idle_exit, settings.log_level) == (120_000, "DEBUG")


def test_an_explicit_file_is_the_only_one(write: Write, config_path: tuple[Path, Path]) -> None:
    write("c.GPUBroker.idle_exit = '1m'", config_path[0])
    explicit = write("c.GPUBroker.log_level = 'ERROR'")
    settings = load(str(explicit))
    assert settings.files == (explicit,)
    assert (settings.idle_exit, settings.log_level) == (600_000, "ERROR")


def test_the_command_line_wins_and_none_means_not_given(write: Write) -> None:
    file = write("c.GPUBroker.idle_exit = '1m'\nc.GPUBroker.log_level = 'ERROR'")
    settings = load(file, {"idle_exit": "never", "log_level": None, "state_dir": "/var/lib/x"})
    assert (settings.idle_exit, settings.log_level, settings.state_dir) == (None, "ERROR", Path("/var/lib/x"))


def test_a_pool_can_be_added_to_what_another_file_configures(write: Write, config_path: tuple[Path, Path]) -> None:
    user, system = config_path
    write("c.GPUBroker.pools = {'default': {}, 'big': {'devices': [0]}}", system)
    write("c.GPUBroker.pools.update({'small': {'devices': [1]}})", user)
    assert [pool.name for pool in load().pools] == ["default", "big", "small"]
    assert [pool.name for pool in load(None, {}).pools] == ["default", "big", "small"]


def test_a_subconfig_next_to_the_file_is_read(write: Write, tmp_path: Path) -> None:
    (tmp_path / "more.py").write_text("c.GPUBroker.idle_exit = '3m'")
    assert load(write("load_subconfig('more.py')")).idle_exit == 180_000


def test_a_missing_explicit_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{tmp_path}/nowhere\.py cannot be read: No such file or directory; check"):
        load(tmp_path / "nowhere.py")


def test_a_directory_in_its_place_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path} is not a regular file"):
        load(tmp_path)


def test_a_file_that_anybody_can_write_is_not_run(write: Write, tmp_path: Path) -> None:
    proof = tmp_path / "it ran"
    file = write(f"open({str(proof)!r}, 'w').close()")
    file.chmod(0o666)
    with pytest.raises(ConfigError, match=f"is writable by every user, so it was not run; run chmod o-w {file}"):
        load(file)
    assert not proof.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n\nc.GPUBroker.idle_exit = = 3\n", r", line 3: invalid syntax$"),
        ("x = 1\nc.GPUBroker.idle_exit = minutes(5)\n", r", line 2: NameError: name 'minutes' is not defined$"),
        ("c.GPUBroker.pools['x'] = {}\n", r", line 1: TypeError: .*LazyConfigValue"),
        ("import sys\n\nsys.exit(0)\n", r", line 3: SystemExit: 0$"),
        ("def five():\n    return 5 / 0\n\nfive()\n", r", line 2: ZeroDivisionError: division by zero$"),
        (
            "c.GPUBroker.idel_exit = '5m'",
            r": c\.GPUBroker\.idel_exit is unknown; did you mean 'idle_exit'\? Allowed: .*pools",
        ),
        (
            "c.GPUBrokr.idle_exit = '5m'",
            r": c\.GPUBrokr is unknown; did you mean 'GPUBroker'\? Allowed: GPUBroker$",
        ),
        ("c.idle_exit = '5m'", r": c\.idle_exit is unknown; Allowed: GPUBroker$"),
        ("c.GPUBroker.pools = []", r": c\.GPUBroker\.pools = \[\]: expected at least one pool"),
        (
            "c.GPUBroker.idle_exit = 2.5",
            r": c\.GPUBroker\.idle_exit = 2\.5: expected a duration such as .* or 'never'$",
        ),
        ("c.GPUBroker.devices = 0", r": c\.GPUBroker\.devices = 0: expected 'all', or a list"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_place(write: Write, text: str, message: str) -> None:
    file = write(text)
    with pytest.raises(ConfigError, match=f"^{file}{message}"):
        load(file)


def test_an_unreadable_encoding_is_named(tmp_path: Path) -> None:
    file = tmp_path / CONFIG_NAME
    file.write_bytes(b"x = '\xff'\n")
    with pytest.raises(ConfigError, match=f"^{file}"):
        load(file)


def test_an_unknown_or_bad_override_names_the_command_line() -> None:
    with pytest.raises(
        ConfigError, match=r"^the command line: c\.GPUBroker\.idle_exi is unknown; did you mean 'idle_exit'"
    ):
        load(None, {"idle_exi": "5m"})
    with pytest.raises(ConfigError, match=r"^the command line: c\.GPUBroker\.idle_exit = 'soon': .* or 'never'$"):
        load(None, {"idle_exit": "soon"})


def test_the_file_that_set_a_bad_value_is_the_one_that_is_named(write: Write, config_path: tuple[Path, Path]) -> None:
    user, system = config_path
    bad = write("c.GPUBroker.lock_timeout = 'a while'", system)
    write("c.GPUBroker.idle_exit = '5m'", user)
    with pytest.raises(ConfigError, match=rf"^{bad}: c\.GPUBroker\.lock_timeout = 'a while': "):
        load()
