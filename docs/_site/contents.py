"""Which page of docs/ is in which section of the site, in reading order. Each page is in exactly one; the build checks it.

The first five sections are one path for each reader.
"""

from typing import Final

SECTIONS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "One GPU": (
        "For your own machine, with or without a GPU. Read the first page, then continue with Use a share.",
        ("start", "one-card", "environments"),
    ),
    "Use a share": (
        "For notebooks, scripts and programs, on your own machine or on a hub. On a hub, begin here.",
        ("using", "frameworks", "magics", "clients", "agents", "measuring", "troubleshooting", "faq", "glossary"),
    ),
    "Run a hub": (
        "For administrators of a JupyterHub or a workstation: many users on few GPUs.",
        (
            "planning",
            "hub",
            "tljh",
            "teaching",
            "policies",
            "costs",
            "workstation",
            "operating",
            "broker",
            "nvidia",
            "metrics",
            "revocation",
            "audit",
        ),
    ),
    "Run a cluster": (
        "For administrators of Slurm and Kubernetes: shares of GPUs for jobs and pods.",
        ("clusters", "clusters-operating", "clusters-facts", "kubernetes", "workloads", "cluster-simulation"),
    ),
    "Contribute": (
        "For contributors, and for packages that extend it.",
        ("contributing", "architecture", "lease-states", "promises", "extending", "gpu-tests", "driver-errors"),
    ),
    "Evidence": (
        "What it costs and saves, and how well it forecasts.",
        ("benchmarks", "overhead", "forecasts", "simulator", "simulator-files"),
    ),
    "Reference": (
        "Commands, settings, pools, errors, events and routes, generated from the code.",
        ("commands", "routes", "limits"),
    ),
}
"""Section -> a sentence about it, and its pages: names of files in docs/ without `.md`."""
