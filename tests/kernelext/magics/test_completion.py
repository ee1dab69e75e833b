"""Completions after `%gpu`: commands, options, values; also in a real kernel."""

from pathlib import Path

import pytest

from fractional_gpu_kernel.magics.arguments import COMMANDS, Completer
from fractional_gpu_kernel.settings import Settings
from tests.kernelext.kernels import RunningKernel
from tests.kernelext.scripted_broker import LEASE, TOKEN, ScriptedBroker

FRACTIONS = ["1/8", "1/4", "1/2", "3/4", "1"]
SIZES = ["10GiB", "20GiB", "40GiB", "80GiB"]


@pytest.fixture
def nobody(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Completer:
    monkeypatch.setenv("JUPYTER_GPU_DEVICE_MIB", "81920")
    (folder / "token").write_text(TOKEN)
    return Completer(Settings(LEASE, str(folder / "none.sock"), str(folder / "token")))


@pytest.mark.parametrize(
    ("line", "fragment", "texts"),
    [
        ("%gpu ", "", list(COMMANDS)),
        ("  %gpu  re", "re", ["request", "resize", "resume", "release"]),
        ("%gpu resize ", "", [*FRACTIONS, "--memory", "--later"]),
        ("%gpu resize 1/", "1/", ["1/8", "1/4", "1/2"]),
        ("%gpu resize 1/2 ", "", ["--memory", "--later"]),
        ("%gpu resize --memory ", "", SIZES),
        ("%gpu resize --memory 2", "2", ["20GiB"]),
        ("%gpu resize --memory 20GiB ", "", [*FRACTIONS, "--later"]),
        ("%gpu resize --later --", "--", ["--memory", "--help"]),
        ("%gpu request 1/2 --pool ", "", []),
        ("%gpu pin 1", "1", ["15m", "1h"]),
        ("%gpu pin 30m ", "", []),
        ("%gpu help pi", "pi", ["pin"]),
        ("%gpu explain --l", "--l", ["--lines"]),
        ("%gpu status -", "-", ["--help"]),
        ("%gpu nonsense ", "", []),
        ("%%gpu ", "", [*FRACTIONS, "measure", "--memory"]),
        ("%%gpu m", "m", ["measure"]),
        ("%%gpu measure --from", "--from", ["--from-start"]),
        ("%%gpu measure --within ", "", ["2m", "5m", "10m"]),
        ("%%gpu measure --fractions 1/", "1/", ["1/8", "1/4", "1/2"]),
        ("%%gpu measure --from-start --ne", "--ne", ["--neighbour"]),
        ("%%gpu measure --neighbour a --ne", "--ne", ["--neighbour"]),
        ("%gpu help meas", "meas", ["measure"]),
        ("%%gpu 1 --m", "--m", ["--memory"]),
    ],
)
def test_proposals_without_a_broker(nobody: Completer, line: str, fragment: str, texts: list[str]) -> None:
    assert nobody.complete(line) == (fragment, texts)


@pytest.mark.parametrize("line", ["", "%gpu", "%gpus ", "x = %gpu ", "print('%gpu ')", "%time %gpu "])
def test_what_is_not_ours_is_left_alone(nobody: Completer, line: str) -> None:
    assert nobody.complete(line) is None


def test_a_pools_own_fractions_are_proposed_and_asked_for_once(folder: Path, broker: ScriptedBroker) -> None:
    (folder / "token").write_text(TOKEN)
    completer = Completer(Settings(LEASE, broker.path, str(folder / "token")))
    for _ in range(3):
        assert completer.complete("%gpu resize ") == ("", ["1/4", "--memory", "--later"])
    assert completer.complete("%gpu request 1/4 --pool ") == ("", ["default"])
    assert broker.routes() == ["status"]


def test_a_kernel_completes_at_the_cursor(kernel: RunningKernel, broker: ScriptedBroker) -> None:
    def complete(code: str) -> tuple[list[str], str]:
        content = kernel.finish(kernel.client.complete(code)).reply["content"]
        return content["matches"], code[: content["cursor_start"]]

    assert complete("%gpu s") == (["status", "suspend"], "%gpu ")
    assert complete("x = 1\n%gpu resize 1/") == (["1/4"], "x = 1\n%gpu resize ")
    assert complete("%gpu resize --me") == (["--memory"], "%gpu resize ")
    assert complete("%%gpu 1/") == (["1/4"], "%%gpu ")
    assert "acquire" not in broker.routes()
