"""Kernelspecs appear whole, say what they are, start real kernels, and never touch what we did not make."""

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager

from fractional_gpu.jupyter import kernelspecs
from fractional_gpu.jupyter.kernelspecs import (
    PROVISIONER_NAME,
    SeatKernelSpecManager,
    install,
    list_installed,
    logo,
    remove,
    spec_name,
)
from fractional_gpu.protocol.errors import BadRequestError, FractionalGPUError, NotFoundError
from tests.jupyter.conftest import Places
from tests.support.fake_broker import FakeBroker
from tests.support.kernels import evaluate, talking_to


def test_an_installed_kernelspec_says_what_its_base_says(places: Places) -> None:
    (spec,) = install("default", [250], base="env", directory=str(places.specs))
    assert (spec.name, spec.gated, spec.simulated) == ("fractional-gpu-default-250-env", True, False)
    content = json.loads((spec.folder / "kernel.json").read_text())
    assert content["argv"] == [places.python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    assert content["metadata"]["kernel_provisioner"] == {
        "provisioner_name": PROVISIONER_NAME,
        "config": {"pool": "default", "fraction": "250m"},
    }
    assert content["metadata"]["supported_encryption"] == ["curve"]
    assert content["metadata"]["debugger"] is True
    assert content["kernel_protocol_version"] == "5.5"
    assert content["interrupt_mode"] == "signal"
    assert KernelSpecManager().get_kernel_spec(spec.name).display_name == spec.display_name
    assert sorted(path.name for path in spec.folder.iterdir()) == ["kernel.json", "logo-svg.svg"]
    assert sorted(path.name for path in places.specs.iterdir()) == ["env", "fractional-gpu-default-250-env"]


@pytest.mark.parametrize(
    ("pool", "milli", "simulated", "shown"),
    [
        ("default", 250, False, "Python 3 · 1/4 GPU"),
        ("default", 1000, True, "Python 3 · 1 GPU (simulated)"),
        ("teaching", 230, False, "Python 3 · 0.23 GPU · teaching"),
    ],
)
def test_the_launcher_shows_share_pool_and_simulation(
    places: Places, pool: str, milli: int, simulated: bool, shown: str
) -> None:
    (spec,) = install(pool, [milli], base="env", directory=str(places.specs), simulated=simulated)
    assert spec.display_name == shown


@pytest.mark.parametrize("encryption", ["disabled", "required"])
def test_a_kernel_of_an_installed_kernelspec_starts(places: Places, broker: FakeBroker, encryption: str) -> None:
    (spec,) = install("default", [125], base="env", directory=str(places.specs))
    (places.work / "mymodule.py").write_text("answer = 42")
    manager = KernelManager(kernel_name=spec.name, transport_encryption=encryption)
    manager.start_kernel(cwd=str(places.work))
    try:
        lease = broker.only_lease()[1]
        assert (lease.request["fraction_milli"], lease.request["gated"]) == (125, True)
        assert ("curve_secretkey" in lease.attach["connection"]) == (encryption == "required")
        with talking_to(manager) as client:
            assert "site-packages/fractional_gpu_kernel" in evaluate(client, "gpu_extension")
            assert evaluate(client, "__import__('mymodule').answer") == "42"
            assert evaluate(client, "__import__('sys').path[0]") != "''"
    finally:
        manager.shutdown_kernel(now=True)


def test_a_kernel_without_the_extension_keeps_its_command(places: Places) -> None:
    places.write_spec("bash", ["bash_kernel", "-f", "{connection_file}"], language="bash", env={"A": "1"})
    (spec,) = install("default", [500], base="bash", directory=str(places.specs))
    content = json.loads((spec.folder / "kernel.json").read_text())
    assert not spec.gated
    assert (content["argv"], content["env"]) == (["bash_kernel", "-f", "{connection_file}"], {"A": "1"})


def test_installing_again_replaces(places: Places) -> None:
    install("default", [250, 500], base="env", directory=str(places.specs))
    install("default", [250], base="env", directory=str(places.specs), simulated=True)
    listed = list_installed(str(places.specs))
    assert [(spec.fraction_milli, spec.simulated) for spec in listed] == [(250, True), (500, False)]


def test_what_is_installed_is_listed_and_removed_wherever_jupyter_looks(places: Places) -> None:
    install("b", [1000, 125], base="env", directory=str(places.specs))
    install("a", [500], base="env", directory=KernelSpecManager().user_kernel_dir)
    names = ["fractional-gpu-a-500-env", "fractional-gpu-b-125-env", "fractional-gpu-b-1000-env"]
    assert [spec.name for spec in list_installed()] == names
    assert [spec.name for spec in remove(["fractional-gpu-b-125-env"])] == ["fractional-gpu-b-125-env"]
    with pytest.raises(NotFoundError, match="'env'"):
        remove(["fractional-gpu-a-500-env", "env"])
    assert [spec.name for spec in list_installed()] == [names[0], names[2]]
    remove()
    assert list_installed() == []
    assert (places.specs / "env").exists()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"name": "."}, "not a valid kernelspec name"),
        ({"name": ".."}, "not a valid kernelspec name"),
        ({"display_name": ""}, "cannot be used as"),
        ({"display_name": "  "}, "cannot be used as"),
        ({"display_name": "two\nlines"}, "cannot be used as"),
        ({"display_name": "\udcff"}, "cannot be used as"),
        ({"display_name": "n" * 201}, "1 to 200 printable"),
    ],
)
def test_a_name_that_is_none_is_refused_before_anything_is_written(
    places: Places, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], said: str
) -> None:
    empty = places.specs / "new"
    empty.mkdir()
    monkeypatch.chdir(empty)
    with pytest.raises(BadRequestError, match=said):
        install("default", [250], directory=str(empty / "kernels"), **how)
    assert list(empty.iterdir()) == []


def test_a_kernelspec_that_is_a_link_is_removed_and_not_what_it_names(places: Places) -> None:
    directory = places.specs
    (spec,) = install("default", [250], directory=str(directory))
    kept = directory.parent / "dotfiles"
    spec.folder.rename(kept)
    spec.folder.symlink_to(kept)
    assert [one.name for one in remove(directory=str(directory))] == [spec.name]
    assert not spec.folder.is_symlink()
    assert (kept / "kernel.json").is_file()


def test_bases_launchers_and_names_do_not_overwrite_each_other(places: Places) -> None:
    directory = str(places.specs)
    places.write_spec("Other.Env")
    made = [
        *install("default", [250], directory=directory),
        *install("default", [250], base="env", directory=directory),
        *install("default", [250], base="Other.Env", directory=directory),
        *install("default", [250], launcher=True, directory=directory),
        *install("default", [250], base="env", launcher=True, directory=directory),
        *install("default", [250], name="Quarter", display_name="A quarter", directory=directory),
    ]
    assert [spec.name for spec in made] == [
        "fractional-gpu-default-250",
        "fractional-gpu-default-250-env",
        "fractional-gpu-default-250-other.env",
        "fractional-gpu-default-250-launcher",
        "fractional-gpu-default-250-env-launcher",
        "quarter",
    ]
    assert not any(spec.replaced for spec in made)
    assert {spec.name for spec in list_installed(directory)} == {spec.name for spec in made}
    assert KernelSpecManager().get_kernel_spec("quarter").display_name == "A quarter"
    (again,) = install("default", [250], base="env", directory=directory)
    assert again.replaced
    assert [spec.name for spec in remove(["quarter"], directory=directory)] == ["quarter"]


def test_a_name_that_another_kernelspec_of_ours_has_is_refused(places: Places) -> None:
    directory = str(places.specs)
    install("default", [250], base="env", name="mine", directory=directory)
    with pytest.raises(FractionalGPUError, match=r"'Python 3 · 1/4 GPU' .*'default'.* env\b.*--name"):
        install("default", [500], base="env", name="mine", directory=directory)
    with pytest.raises(FractionalGPUError, match=r"\benv\b"):
        install("default", [250], name="mine", directory=directory)
    assert [(spec.fraction_milli, spec.base) for spec in list_installed(directory)] == [(250, "env")]
    with pytest.raises(BadRequestError, match=r"\b2\b"):
        install("default", [250, 500], name="both", directory=directory)
    with pytest.raises(BadRequestError, match="'a b'"):
        install("default", [250], name="a b", directory=directory)


def test_a_kernelspec_that_another_one_shadows_says_so(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_PATH", str(places.work))
    (hidden,) = install("default", [250], base="env", directory=str(places.specs))
    assert hidden.shadowed_by is None
    (first,) = install("default", [250], base="env", directory=str(places.work / "kernels"))
    (hidden,) = install("default", [250], base="env", directory=str(places.specs))
    assert (first.shadowed_by, hidden.shadowed_by) == (None, first.folder)
    assert [(spec.folder, spec.shadowed_by) for spec in list_installed()] == [
        (first.folder, None),
        (hidden.folder, first.folder),
    ]
    assert len(remove([first.name])) == 2
    assert list_installed() == []


def test_a_folder_that_we_did_not_make_is_not_touched(places: Places) -> None:
    places.write_spec("fractional-gpu-default-250-env")
    with pytest.raises(FractionalGPUError, match="fractional-gpu-default-250-env"):
        install("default", [250], base="env", directory=str(places.specs))
    assert list_installed(str(places.specs)) == []
    with pytest.raises(NotFoundError):
        remove(["fractional-gpu-default-250-env"])


def test_pools_whose_names_differ_in_case_only_do_not_overwrite_each_other(places: Places) -> None:
    install("teaching", [250], base="env", directory=str(places.specs))
    with pytest.raises(FractionalGPUError, match="'teaching'"):
        install("Teaching", [250], base="env", directory=str(places.specs))


def test_where_nothing_can_be_written_another_place_is_advised(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    place = places.work / "a file"
    place.write_text("")
    with pytest.raises(FractionalGPUError, match=r"\(Not a directory\); install it for your user \(--user\), or in"):
        install("default", [250], base="env", directory=str(place / "kernels"))
    monkeypatch.setattr(KernelSpecManager, "user_kernel_dir", str(place / "kernels"))
    with pytest.raises(FractionalGPUError, match=r"\(Not a directory\); install it in a folder that you can write to"):
        install("default", [250], base="env", directory=str(place / "kernels"))


def test_what_makes_no_sense_is_refused_before_anything_is_written(places: Places) -> None:
    target = str(places.work / "specs")
    with pytest.raises(BadRequestError, match=r"'\.\./up'"):
        install("../up", [250], directory=target)
    with pytest.raises(BadRequestError, match=r"1001.*1 to 1000"):
        install("default", [250, 1001], directory=target)
    with pytest.raises(BadRequestError, match="fraction"):
        install("default", [], directory=target)
    with pytest.raises(NotFoundError, match=r"'julia'.*\benv\b"):
        install("default", [250], directory=target, base="julia")
    places.write_gpu_spec("other")
    with pytest.raises(BadRequestError, match="other"):
        install("default", [250], directory=target, base="other")
    assert not Path(target).exists()


def test_a_place_that_cannot_be_written_to_is_named(places: Places) -> None:
    (places.work / "file").touch()
    with pytest.raises(FractionalGPUError, match="file"):
        install("default", [250], directory=str(places.work / "file"))


@pytest.mark.parametrize("content", ['{"argv": [', '["argv"]', '{"metadata": 1}', "\udcff"])
def test_a_kernelspec_that_cannot_be_read_hides_no_other(places: Places, content: str) -> None:
    folder = places.specs / "broken"
    folder.mkdir()
    (folder / "kernel.json").write_text(content, encoding="utf-8", errors="surrogateescape")
    assert SeatKernelSpecManager().get_all_specs().keys() == KernelSpecManager().get_all_specs().keys()
    assert "env" in SeatKernelSpecManager().get_all_specs()


@pytest.mark.parametrize("milli", [1, 125, 500, 501, 999, 1000])
def test_the_logo_is_a_picture(milli: int) -> None:
    shapes = [element.tag.rpartition("}")[2] for element in ET.fromstring(logo(milli))]  # noqa: S314 - our own
    assert shapes == ["circle", "circle" if milli == 1000 else "path"]


def test_the_servers_own_python_is_written_in_full(places: Places) -> None:
    (spec,) = install("default", [250], directory=str(places.specs))  # base python3, which ipykernel brings
    argv = json.loads((spec.folder / "kernel.json").read_text())["argv"]
    assert argv[0] == sys.executable
    assert argv[-2:] == ["-f", "{connection_file}"]


def test_a_program_that_looks_for_the_kernel_of_its_interpreter_finds_none_of_ours(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `jupytext --set-kernel -` does. In an environment's own folder `python` is its interpreter, as in ipykernel's kernelspec."""
    monkeypatch.setattr(kernelspecs, "ENV_JUPYTER_PATH", [str(places.work / "share" / "jupyter")])
    places.write_spec("full", [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"])
    for base in ("python3", "full"):
        (spec,) = install("default", [250], base=base, directory=str(places.work / "share" / "jupyter" / "kernels"))
        assert (spec.argv[0], spec.gated) == ("python", True)
    (other,) = install("default", [250], base="env", directory=str(places.work / "share" / "jupyter" / "kernels"))
    assert other.argv[0] == places.python


def test_names_fold_case_as_jupyter_does() -> None:
    assert spec_name("A100", 250) == "fractional-gpu-a100-250"
