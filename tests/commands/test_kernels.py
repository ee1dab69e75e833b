"""`jupyter gpu kernels`: install, list, remove."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fractional_gpu.commands.kernels import ANY_OFFERS_MILLI, _where_they_appear, install_offers
from fractional_gpu.commands.main import main
from fractional_gpu.jupyter.kernelspecs import list_installed
from tests.commands.conftest import OwnBroker


@pytest.fixture
def pools(broker: OwnBroker) -> OwnBroker:
    """A broker with two pools; one of them offers any fraction."""
    broker.extra["pools"] = {"default": [250, 500], "teaching": []}
    return broker


def installed(prefix: Path) -> list[tuple[str, int, bool]]:
    return [(spec.pool, spec.fraction_milli, spec.simulated) for spec in list_installed(prefix=str(prefix))]


def test_what_the_pools_offer_is_installed(
    pools: OwnBroker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kernels", "install", "--prefix", str(tmp_path)]) == 0
    any_fraction = [("teaching", milli, True) for milli in ANY_OFFERS_MILLI]
    assert installed(tmp_path) == [("default", 250, True), ("default", 500, True), *any_fraction]
    shown = capsys.readouterr().out
    assert "installed Python 3 · 1/4 GPU (simulated)" in shown
    assert pools.routes() == ["ping", "status"]


def test_one_pool_alone(pools: OwnBroker, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "install", "--pool", "default", "--prefix", str(tmp_path)]) == 0
    assert [pool for pool, _, _ in installed(tmp_path)] == ["default", "default"]
    assert main(["kernels", "install", "--pool", "gone", "--prefix", str(tmp_path)]) == 1
    assert "there is no pool 'gone'; the broker has default, teaching" in capsys.readouterr().err
    assert pools.routes().count("status") == 2


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
    assert "fraction '3/2' is out of range; allowed: more than 0 and at most 1" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_base_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "install", "--fraction", "1/4", "--base", "cobol", "--prefix", str(tmp_path)]) == 1
    assert "there is no kernelspec 'cobol'" in capsys.readouterr().err


def test_the_list_for_people_and_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "list", "--prefix", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "No kernel is installed; `jupyter gpu kernels install` adds some.\n"
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


def test_why_a_kernel_is_without_the_extension_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (base := tmp_path / "share" / "jupyter" / "kernels" / "wrapped").mkdir(parents=True)
    argv = ["/opt/helper.sh", "python", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (base / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "Wrapped", "language": "python"}))
    for launcher in ([], ["--launcher"]):
        words = ["--base", "wrapped", "--fraction", "1/4", "1/2", "--prefix", str(tmp_path), *launcher]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("JUPYTER_PATH", str(tmp_path / "share" / "jupyter"))
            assert main(["kernels", "install", *words]) == 0
        assert "note: /opt/helper.sh does not start ipykernel directly" in capsys.readouterr().out
    assert main(["kernels", "list", "--prefix", str(tmp_path)]) == 0
    (note,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert note.startswith("note: /opt/helper.sh does not start ipykernel directly")


def test_what_is_replaced_or_shadowed_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install = ["kernels", "install", "--fraction", "1/4", "--name", "mine", "--display-name", "Mine", "--prefix"]
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "first" / "share" / "jupyter"))
    for prefix, says in [("first", "installed Mine"), ("first", "replaced Mine"), ("second", "installed Mine")]:
        assert main([*install, str(tmp_path / prefix)]) == 0
        assert capsys.readouterr().out.startswith(says)
    assert main([*install, str(tmp_path / "second")]) == 0
    folder = tmp_path / "first" / "share" / "jupyter" / "kernels" / "mine"
    assert f"note: Jupyter does not show it: {folder} has the same name" in capsys.readouterr().out
    assert main(["kernels", "list", "--prefix", str(tmp_path / "second")]) == 0
    assert f"(shadowed by {folder})" in capsys.readouterr().out


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


def test_a_private_folder_follows_what_is_offered(tmp_path: Path) -> None:
    folder = str(tmp_path)
    install_offers({"default": [250, 500], "old": [1000]}, directory=folder, simulated=False)
    install_offers({"default": [500, 750]}, directory=folder, simulated=True)
    now = [(spec.pool, spec.fraction_milli, spec.simulated) for spec in list_installed(directory=folder)]
    assert now == [("default", 500, True), ("default", 750, True)]


# -- where they appear -----------------------------------------------------------------------------------------------------


def test_whose_launchers_show_them_is_said(
    broker: OwnBroker, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    assert main(["kernels", "install", "--fraction", "1/4", "--user"]) == 0
    assert "in the launcher of each Jupyter server of yours" in capsys.readouterr().out
    assert main(["kernels", "install", "--fraction", "1/4", "--prefix", str(tmp_path / "other")]) == 0
    assert (
        f"does not look there: start its server with JUPYTER_PATH={tmp_path}/other/share/jupyter"
        in capsys.readouterr().out
    )
    assert not broker.calls


def test_a_jupyterlab_of_another_environment_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Path(sys.prefix) / "share" / "jupyter" / "kernels"
    assert f"of the environment {sys.prefix}" in _where_they_appear(place)
    lab = tmp_path / "jupyter-lab"
    lab.write_text("#!/bin/sh\n")
    lab.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    said = _where_they_appear(place)
    assert f"the jupyter-lab on your PATH ({lab}) is of another environment" in said
    assert "--user" in said
