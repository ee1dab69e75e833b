"""Defines the interface between a node agent and an engine (Slurm or Kubernetes), and its errors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from fractional_gpu.protocol.errors import FractionalGPUError


class EngineError(FractionalGPUError):
    """The engine refused a request or gave an invalid answer. Retrying won't help until an administrator changes something."""

    code: ClassVar[str] = "engine"
    status: ClassVar[int] = 502


class EngineUnavailableError(EngineError):
    """The engine's controller did not answer, but may answer later."""

    code: ClassVar[str] = "engine-unavailable"
    status: ClassVar[int] = 503


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A node as reported by the engine. Counts are in the engine's unit, keyed by the engine's resource names."""

    counts: Mapping[str, int]  # how much the engine may allocate
    in_use: Mapping[str, int]  # how much the engine has allocated
    most: Mapping[str, int]  # the highest counts that are allowed
    text: str = ""  # all resources of the node, in the engine's format
    summary: str = ""  # the summary that an agent has published


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWrite:
    """The counts to write, keyed by the engine's resource names, and the summary. Equal writes have the same effect."""

    counts: Mapping[str, int] = field(default_factory=dict)
    summary: str = ""


class Engine(Protocol):
    """An engine's interface to one node. Calls block for at most a few seconds. They may raise EngineUnavailableError or EngineError."""

    def read_node(self) -> NodeRecord:
        """Return the current record of the node."""

    def write_node(self, write: NodeWrite, record: NodeRecord) -> None:
        """Write the counts and the summary. `record` is the most recently read record."""
