"""The interface between a node agent and an engine (Slurm or Kubernetes), and its errors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from fractional_gpu.protocol.errors import FractionalGPUError


class EngineError(FractionalGPUError):
    """The engine refused a request or gave an invalid answer. Retrying does not help until an administrator changes something."""

    code: ClassVar[str] = "engine"
    status: ClassVar[int] = 502


class EngineUnavailableError(EngineError):
    """The engine's controller did not answer, but may answer later."""

    code: ClassVar[str] = "engine-unavailable"
    status: ClassVar[int] = 503


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A node as the engine reports it. Counts are in the engine's unit, and their keys are the engine's names of the resources."""

    counts: Mapping[str, int]  # how much the engine may allocate
    in_use: Mapping[str, int]  # how much the engine has allocated
    most: Mapping[str, int]  # the highest counts that are allowed
    text: str = ""  # all resources of the node, in the engine's format
    summary: str = ""  # the summary that an agent has published


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWrite:
    """The counts to write, by the engine's names of the resources, and the summary. Two equal writes have the same effect."""

    counts: Mapping[str, int] = field(default_factory=dict)
    summary: str = ""


class Engine(Protocol):
    """An engine's interface to one node. Calls block for at most a few seconds. They raise EngineUnavailableError or EngineError."""

    def read_node(self) -> NodeRecord:
        """Return the current record of the node."""

    def write_node(self, write: NodeWrite, record: NodeRecord) -> None:
        """Write the counts and the summary. `record` is the record that was read last."""
