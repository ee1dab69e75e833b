"""`jupyter gpu kernels`: install, list, remove."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.kernelspec import KernelSpecManager
from msgspec.structs import replace

from fractional_gpu.commands.kernels import ANY_OFFERS_MILLI
from fractional_gpu.commands.main import main
from fractional_gpu.jupyter.kernelspecs import list_installed
from tests.commands.conftest import OwnBroker


@pytest.fixture
def pools(broker: OwnBroker) -> OwnBroker:
    """A broker with two pools; one of them offers any fraction."""
    broker.extra["pools"] = {"default": [250, 500], "teaching": []}
    return broker


def installed(prefix: Path) -> list[tuple[str, int, bool]]:
    return [
        (spec.pool, spec.fraction_milli, spec.simulated)
        for spec in list_installed(str(prefix / "share" / "jupyter" / "kernels"))
    ]


def test_what_the_pools_offer_is_installed(
    pools: OwnBroker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kernels", "install", "--prefix", str(tmp_path)]) == 0
    any_fraction = [("teaching", milli, True) for milli in ANY_OFFERS_MILLI]
    assert installed(tmp_path) == [("default", 250, True), ("default", 500, True), *any_fraction]
    shown = capsys.readouterr().out
    assert "installed Python 3 · 1/4 GPU (simulated)" in shown
    assert pools.routes() == ["ping", "status"]


@pytest.mark.usefixtures("pools")
def test_kernels_that_no_pool_offers_any_more_are_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "user"))
    before = (("gone", "1/4"), ("default", "1/8"), ("default", "1/4"), ("teaching", "1/3"))
    for pool, fraction in before:
        assert main(["kernels", "install", "--pool", pool, "--fraction", fraction]) == 0
    assert main(["kernels", "install", "--pool", "gone", "--fraction", "1/2", "--user"]) == 0
    capsys.readouterr()
    assert main(["kernels", "install", "--pool", "default"]) == 0
    names = [(pool, milli) for pool, milli, _ in installed(tmp_path)]
    assert names == [("default", 250), ("default", 500), ("gone", 250), ("teaching", 333)], "one pool alone"
    assert "removed Python 3 · 1/8 GPU  " in capsys.readouterr().out
    assert main(["kernels", "install"]) == 0
    kept = {(pool, milli) for pool, milli, _ in installed(tmp_path)}
    assert kept == {
        ("default", 250),
        ("default", 500),
        ("teaching", 333),
        *(("teaching", one) for one in ANY_OFFERS_MILLI),
    }
    assert "removed Python 3 · 1/4 GPU · gone  " in capsys.readouterr().out
    assert [spec.pool for spec in list_installed(KernelSpecManager().user_kernel_dir)] == ["gone"], "in another place"


def test_given_fractions_need_no_broker(broker: OwnBroker, tmp_path: Path) -> None:
    assert main(["kernels", "install", "--fraction", "1/4", "0.5", "--prefix", str(tmp_path)]) == 0
    assert installed(tmp_path) == [("default", 250, False), ("default", 500, False)]
    assert broker.calls == []


def config(prefix: Path, name: str) -> Any:  # noqa: ANN401 - JSON
    text = (prefix / "share" / "jupyter" / "kernels" / name / "kernel.json").read_text()
    return json.loads(text)["metadata"]["kernel_provisioner"]["config"]


def test_a_simulated_kernelspec_carries_its_devices(
    pools: OwnBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools.devices = [replace(pools.device, index=0, memory_mib=2048)]
    assert main(["kernels", "install", "--pool", "default", "--prefix", str(tmp_path)]) == 0
    assert config(tmp_path, "fractional-gpu-default-250")["simulate"] == "1x2048MiB"
    monkeypatch.setenv("JUPYTER_GPU_SIMULATE", "2x1GiB")
    assert main(["kernels", "install", "--fraction", "1/2", "--prefix", str(tmp_path)]) == 0
    assert config(tmp_path, "fractional-gpu-default-500")["simulate"] == "2x1GiB"
    monkeypatch.delenv("JUPYTER_GPU_SIMULATE")
    assert main(["kernels", "install", "--fraction", "1/8", "--prefix", str(tmp_path)]) == 0
    assert "simulate" not in config(tmp_path, "fractional-gpu-default-125")


def test_a_bad_fraction_is_wrong_usage_and_installs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "install", "--fraction", "1/4", "3/2", "--prefix", str(tmp_path)]) == 2
    assert "fraction '3/2' is out of range; expected more than 0 and at most 1" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_base_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "install", "--fraction", "1/4", "--base", "cobol", "--prefix", str(tmp_path)]) == 1
    assert "there is no kernelspec named 'cobol'" in capsys.readouterr().err


def test_the_list_for_people_and_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "list", "--prefix", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "No kernels are installed; add some with `jupyter gpu kernels install`.\n"
    main(["kernels", "install", "--fraction", "1/4", "--prefix", str(tmp_path)])
    capsys.readouterr()
    assert main(["kernels", "list", "--prefix", str(tmp_path)]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["NAME", "SHOWN", "AS", "POOL", "GPU", "FOLDER"]
    assert row.split()[0] == "fractional-gpu-default-250"
    assert main(["kernels", "list", "--json", "--prefix", str(tmp_path)]) == 0
    (kernel,) = json.loads(capsys.readouterr().out)["kernels"]
    assert (kernel["pool"], kernel["fraction_milli"], kernel["gated"]) == ("default", 250, True)
    assert Path(kernel["folder"], "kernel.json").is_file()


def test_removing_by_name_and_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--prefix", str(tmp_path)]
    main(["kernels", "install", "--fraction", "1/4", "1/2", "3/4", *place])
    assert main(["kernels", "remove", "fractional-gpu-default-250", *place]) == 0
    assert [milli for _, milli, _ in installed(tmp_path)] == [500, 750]
    assert main(["kernels", "remove", "fractional-gpu-default-250", *place]) == 1
    assert "installed: fractional-gpu-default-500, fractional-gpu-default-750" in capsys.readouterr().err
    assert main(["kernels", "remove", "--all", *place]) == 0
    assert installed(tmp_path) == []
    capsys.readouterr()
    assert main(["kernels", "remove", "--all", *place]) == 0
    assert capsys.readouterr().out == "There is nothing to remove.\n"


@pytest.mark.parametrize("arguments", [[], ["some-name", "--all"]])
def test_removing_neither_or_both_is_wrong_usage(arguments: list[str], tmp_path: Path) -> None:
    assert main(["kernels", "remove", *arguments, "--prefix", str(tmp_path)]) == 2


def test_two_places_at_once_are_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["kernels", "list", "--user", "--prefix", "/tmp"])  # noqa: S108 - never used
    assert ended.value.code == 2
    assert "not allowed with argument" in capsys.readouterr().err


# -- where they appear -----------------------------------------------------------------------------------------------------
