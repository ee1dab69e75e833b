"""`tests/run first-day`: follows "Install" in docs/hub.md line by line, with users in a real browser.

The package is built and installed as the pages say, into a new environment. The hub then runs on what looks like a separate machine:
in namespaces with other users, /etc, /home, /run, /var/lib, network and processes. It has no GPU, so the call gets what the page
says for that case. Three users take half of the GPU each and fill it in turns; the fourth learns how long the wait is.

Needs root, Chromium, a package index, and npm or JupyterHub's proxy.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import Browser, Page, expect

from docs._site.installing import BUILD
from tests.e2e.browser import Lab, new_page, opened_browser
from tests.site.blocks import Block, blocks, commands
from tests.support.paths import ROOT
from tests.support.stories import CHECK, fill
from tests.support.world import until

USERS: Final = ("ada", "bob", "carol")
LATE: Final = "dave"
PASSWORD: Final = "correct horse battery staple"  # noqa: S105 - of users that exist for this script alone
ADDRESS: Final = "http://127.0.0.1:8000/"
WITHOUT_GPU: Final = 'simulate="1x8GiB"'
_PROXY: Final = "configurable-http-proxy"


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def section() -> list[Block]:
    lines = (ROOT / "docs" / "hub.md").read_text().splitlines()
    first = lines.index("## Install")
    last = next(number for number in range(first + 1, len(lines)) if lines[number].startswith("## "))
    assert f"add `{WITHOUT_GPU}` to the call" in "\n".join(lines[first:last]), (
        "what the page says for a machine without a GPU"
    )
    return [one for one in blocks(ROOT / "docs" / "hub.md") if first < one.line <= last]


class Machine:
    def __init__(self, folder: Path) -> None:
        self.here = folder / "here"
        self.environment = folder / "environment"
        kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "LANG"))}
        path = [
            self.environment / "bin",
            folder / "node" / "bin",
            *sorted(_place_of(_PROXY)),
            "/usr/sbin:/usr/bin:/sbin:/bin",
        ]
        home = folder / "home"
        home.mkdir(exist_ok=True)
        self.variables = {
            **kept,
            "HOME": str(home),
            "PATH": ":".join(map(str, path)),
            "npm_config_prefix": str(folder / "node"),
        }

    def type(self, line: str, *, cwd: Path | None = None) -> str:
        say(f"# {line}")
        done = subprocess.run(
            ["bash", "-ec", line], cwd=cwd or self.here, env=self.variables, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        say(done.stdout)
        assert done.returncode == 0, f"{line}: ended with {done.returncode}"
        return done.stdout


def _place_of(program: str) -> set[Path]:
    found = shutil.which(program)
    return {Path(found).parent} if found else set()


def install(machine: Machine) -> None:
    """Do everything that needs a network: build the wheel from a clone as docs/start.md says, and run the page's first block."""
    machine.here.mkdir()
    subprocess.run([sys.executable, "-m", "venv", machine.environment], check=True)
    clone = machine.here.parent / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    machine.type(BUILD, cwd=clone)
    (wheel,) = clone.glob("*.whl")
    shutil.copy(wheel, machine.here)
    first, *_ = section()
    for line in commands(first.text):
        if _PROXY not in line or not _place_of(_PROXY):
            machine.type(line)


# -- on the machine -----------------------------------------------------------------------------------------------------------


def become_a_machine(folder: Path) -> None:
    run = subprocess.run
    run(["ip", "link", "set", "lo", "up"], check=True)
    for place in ("/home", "/run", "/var/lib"):
        run(["mount", "-t", "tmpfs", "none", place], check=True)
    shutil.copytree("/etc", folder / "etc", symlinks=True)
    run(["mount", "--bind", folder / "etc", "/etc"], check=True)
    for name in (*USERS, LATE):
        run(["useradd", "--create-home", "--shell", "/bin/bash", name], check=True)
        run(["chpasswd"], input=f"{name}:{PASSWORD}", text=True, check=True)


@contextmanager
def followed(machine: Machine) -> Iterator[Path]:
    """Follow the page after its first block; yields the hub's log. The hub ends with the block."""
    log, hub = machine.here / "hub.log", None
    _, *rest = section()
    try:
        for block in rest:
            if block.language == "python":
                config = block.text.replace("configure(c, ", f"configure(c, {WITHOUT_GPU}, ")
                (machine.here / "jupyterhub_config.py").write_text(config)
                continue
            for line in commands(block.text):
                if line == "jupyterhub":
                    with log.open("w") as written:
                        hub = subprocess.Popen(
                            ["jupyterhub"], cwd=machine.here, env=machine.variables, stdout=written, stderr=written,
                            executable=machine.environment / "bin" / "jupyterhub",
                        )  # fmt: skip
                    until(_serves, "the hub serves")
                else:
                    machine.type(line)
        yield log
    finally:
        if hub is not None:
            hub.terminate()
            hub.wait()
        say(log.read_text() if log.exists() else "")


def _serves() -> bool:
    try:
        with urllib.request.urlopen(f"{ADDRESS}hub/login") as reply:  # noqa: S310 - loopback
            return bool(reply.status == 200)
    except urllib.error.HTTPError:
        return False  # the proxy is running, but not yet the hub
    except OSError:
        return False


def choose(browser: Browser, name: str, share: str) -> Page:
    page = new_page(browser)
    page.goto(ADDRESS)
    page.get_by_label("Username").fill(name)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    page.get_by_label(share).check()
    page.get_by_role("button", name="Start").click()
    return page


def opened(page: Page) -> Lab:
    cards = page.locator('.jp-LauncherCard[data-category="Notebook"] .jp-LauncherCard-label').filter(has_text="GPU")
    expect(cards).to_have_text([f"Python 3 · {share} GPU (simulated)" for share in ("1/8", "1/4", "1/2")])
    nowhere: Any = None
    lab = Lab(nowhere, page)
    lab.launch("Python 3 · 1/2 GPU")
    return lab


def users_share_the_gpu(log: Path) -> None:
    """Three users fill half of the GPU each and find it unchanged; the fourth waits for a seat."""
    with opened_browser() as browser:
        labs = []
        for seed, name in enumerate(USERS):
            labs.append(lab := opened(choose(browser, name, "1/2 GPU")))
            lab.run(fill(seed, 16).strip() + '\nprint("filled")')
            expect(lab.output).to_contain_text("filled")
            say(f"{name} has filled half of the GPU")
        for name, lab in zip(USERS, labs, strict=True):
            lab.run(CHECK.strip())
            expect(lab.output).to_contain_text("intact")
            say(f"{name} finds it intact")
        waiting = choose(browser, LATE, "1/2 GPU").locator("#progress-message")
        expect(waiting).to_contain_text("You are number 1 in the queue; about")
        expect(waiting).to_contain_text("to wait. Available now: ")
        say(f"{LATE}: {waiting.text_content()}")
    text = log.read_text()
    assert (
        "has room for about 20 seats of 1/8 GPU, or 8 seats of 1/4 GPU, or 3 seats of 1/2 GPU; with more, over 10 %"
        in text
    )
    assert "got no kernel" not in text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tests/run first-day", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside is not None:
        become_a_machine(options.inside)
        with followed(Machine(options.inside)) as log:
            users_share_the_gpu(log)
        return 0
    with tempfile.TemporaryDirectory(prefix="jfg-day-") as text:
        folder = Path(text)
        folder.chmod(0o755)
        install(Machine(folder))
        apart = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return subprocess.run(
            [*apart, sys.executable, "-m", "tests.hub.first_day", "--inside", folder], check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
