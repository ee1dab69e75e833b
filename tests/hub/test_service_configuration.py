"""`add_page` adds the page to a hub: the service, its scopes, and the roles that have them."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jupyterhub.app import JupyterHub
from traitlets.config import Config

from fractional_gpu.client.discovery import SYSTEM_SOCKET
from fractional_gpu.config import ConfigError
from fractional_gpu_hub import configure
from fractional_gpu_hub.service import ADMIN_SCOPE, READ_SCOPE, add_page


def listed(lazy: Any) -> list[Any]:  # noqa: ANN401 - traitlets' own
    return list(lazy.get_value([]))


def test_the_page_is_a_service_beside_the_broker_and_follows_its_socket(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        JupyterHub, "extra_user_scopes", set(), raising=False
    )  # JupyterHub 6, whichever version is installed
    c, socket = Config(), str(open_folder / "broker.sock")
    configure(c, socket=socket, pools={"default": {}})
    add_page(c, admins=["grace"], admin_groups=["operators"])
    _, page = listed(c.JupyterHub.services)
    assert page["command"] == [sys.executable, "-P", "-m", "fractional_gpu_hub.service", "--socket", socket]
    assert page["oauth_client_allowed_scopes"] == [READ_SCOPE, ADMIN_SCOPE]
    assert page["url"].startswith("http://127.0.0.1:")
    scopes = c.JupyterHub.custom_scopes.get_value({})
    assert set(scopes) == {READ_SCOPE, ADMIN_SCOPE}
    (admin,) = listed(c.JupyterHub.load_roles)
    assert (admin["users"], admin["groups"]) == (["grace"], ["operators"])
    assert ADMIN_SCOPE in admin["scopes"]
    assert c.JupyterHub.extra_user_scopes.get_value(set()) == {READ_SCOPE, "access:services!service=gpu"}


def test_a_hub_of_version_5_redefines_the_user_role_with_all_its_scopes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(JupyterHub, "extra_user_scopes", raising=False)
    c = Config()
    add_page(c)
    _, user = listed(c.JupyterHub.load_roles)
    assert user["name"] == "user"
    assert {"self", READ_SCOPE, "access:services!service=gpu"} <= set(user["scopes"])
    assert ADMIN_SCOPE not in user["scopes"]


@pytest.mark.parametrize("version", [5, 6])
@pytest.mark.parametrize("assigned", [True, False])
def test_a_role_for_all_users_that_the_site_defines_gets_the_scopes_of_the_page(
    monkeypatch: pytest.MonkeyPatch, version: int, *, assigned: bool
) -> None:
    """With such a role JupyterHub ignores its own `extra_user_scopes`, and it refuses a second role of that name."""
    if version == 5:
        monkeypatch.delattr(JupyterHub, "extra_user_scopes", raising=False)
    else:
        monkeypatch.setattr(JupyterHub, "extra_user_scopes", set(), raising=False)
    c, own = Config(), {"name": "user", "scopes": ["self", "list:groups"]}
    if assigned:
        c.JupyterHub.load_roles = [own]
    else:
        c.JupyterHub.load_roles.append(own)
    add_page(c)
    roles = c.JupyterHub.load_roles if assigned else listed(c.JupyterHub.load_roles)
    assert [role["scopes"] for role in roles if role["name"] == "user"] == [
        ["self", "list:groups", READ_SCOPE, "access:services!service=gpu"]
    ]


def test_a_restricted_page_admits_only_the_named_users() -> None:
    c = Config()
    add_page(c, admins=["grace"], everybody=False)
    assert [role["name"] for role in listed(c.JupyterHub.load_roles)] == ["gpu-admin"]
    assert "extra_user_scopes" not in c.JupyterHub
    (page,) = listed(c.JupyterHub.services)
    assert page["command"][-1] == SYSTEM_SOCKET


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"admins": "grace"}, r"add_page\(admins='grace'\): expected a list of names, such as \['grace'\]"),
        ({"admin_groups": "staff"}, "expected a list of names"),
        ({"port": 0}, "expected 1 to 65535"),
    ],
)
def test_what_is_wrong_is_said_with_what_is_allowed(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        add_page(Config(), **given)


def test_started_by_hand_it_says_who_starts_it() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JUPYTERHUB_")}
    done = subprocess.run(
        [sys.executable, "-m", "fractional_gpu_hub.service"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "is not set, because JupyterHub did not start this service" in done.stderr
