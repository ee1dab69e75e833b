"""Which page of docs/ is in which section of the site, in the order of reading. Every page is in exactly one; the build checks it."""

from typing import Final

SECTIONS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "Start": ("Five minutes on your own machine, with or without a GPU.", ("start", "environments")),
    "Use": (
        "Notebooks, scripts and programs on a share of a GPU.",
        ("using", "frameworks", "magics", "clients", "measuring"),
    ),
    "Run a hub": (
        "Many users on few GPUs: pools, seats, costs.",
        ("hub", "tljh", "policies", "costs"),
    ),
    "Run a cluster": (
        "Shares of GPUs for the jobs of Slurm and the pods of Kubernetes.",
        ("clusters", "clusters-operating", "clusters-facts", "kubernetes", "workloads", "cluster-simulation"),
    ),
    "Operate": (
        "Install, look after and mend it; what happens when something goes away.",
        ("operating", "troubleshooting", "broker", "nvidia", "metrics", "revocation", "audit", "limits"),
    ),
    "Understand": (
        "How it decides, what is promised, and what it costs and saves.",
        (
            "architecture",
            "lease-states",
            "promises",
            "forecasts",
            "simulator",
            "simulator-files",
            "benchmarks",
            "overhead",
            "driver-errors",
        ),
    ),
    "Reference": (
        "Commands, settings, pools, errors, events and routes, from the code itself; metrics are in metrics.md.",
        ("commands", "routes"),
    ),
    "Change it": ("Add to it, and how it is tested.", ("contributing", "extending", "gpu-tests")),
    "Questions": ("Short answers, and what words mean here.", ("faq", "glossary")),
}
"""Section -> a sentence about it, and its pages: names of files in docs/ without `.md`."""
