"""Which page of docs/ is in which section of the site, in the order of reading. Every page is in exactly one; the build checks it."""

from typing import Final

SECTIONS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "Use": (
        "Notebooks, scripts and programs on a share of a GPU.",
        ("magics", "clients", "measuring", "advice", "nvidia"),
    ),
    "Run a hub": (
        "Many users on few GPUs: pools, seats, costs.",
        ("hub", "tljh", "policies", "costs"),
    ),
    "Operate": (
        "The broker, what it reports, and what happens when something goes away.",
        ("broker", "workloads", "clusters", "kubernetes", "metrics", "revocation", "audit", "limits"),
    ),
    "Understand": (
        "How it decides, what is promised, and what it costs and saves.",
        (
            "architecture",
            "lease-states",
            "promises",
            "forecasts",
            "simulator",
            "cluster-simulation",
            "benchmarks",
            "driver-errors",
        ),
    ),
    "Reference": ("Commands and configuration, from the code itself.", ("commands", "routes")),
    "Change it": ("Add to it, and how it is tested.", ("extending", "arbiter-tests", "gpu-tests")),
}
"""Section -> a sentence about it, and its pages: names of files in docs/ without `.md`."""
