"""Everything that `tests/run first-day` follows exists, in the order in which it works."""

from tests.hub.first_day import WITHOUT_GPU, section
from tests.site.blocks import commands


def test_the_kernels_are_installed_after_the_hub_that_says_which_there_are() -> None:
    install, config, *started = section()
    assert install.text.startswith("pip install ")
    assert "configure(c, " in config.text
    assert WITHOUT_GPU not in config.text
    assert [line for block in started for line in commands(block.text)] == [
        "jupyterhub",
        "jupyter gpu kernels install --sys-prefix",
        "jupyter gpu doctor",
    ]
