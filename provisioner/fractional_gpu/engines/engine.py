"""The interface between a node agent and an engine (Slurm, Kubernetes), and its errors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from fractional_gpu.protocol.errors import FractionalGPUError


class EngineError(FractionalGPUError):
    """The engine refused, or its answer makes no sense. Retrying helps only after an administrator's change."""

    code: ClassVar[str] = "engine"
    status: ClassVar[int] = 502


class EngineUnavailableError(EngineError):
    """The engine's controller did not answer; it may answer later."""

    code: ClassVar[str] = "engine-unavailable"
    status: ClassVar[int] = 503


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A node as the engine reports it. Counts are in the engine's units, by the engine's names."""

    counts: Mapping[str, int]  # what it may allocate
    in_use: Mapping[str, int]  # what the engine has allocated
    most: Mapping[str, int]  # the highest allowed count
    text: str = ""  # all resources of the node, as the engine writes them
    summary: str = ""  # what an agent has published


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWrite:
    """Counts by the engine's names, and the summary's text. Equal writes mean equal state."""

    counts: Mapping[str, int] = field(default_factory=dict)
    summary: str = ""


class Engine(Protocol):
    """An engine, for one node. Calls block for a few seconds at most. Raises EngineUnavailableError or EngineError."""

    def read_node(self) -> NodeRecord:
        """Return the node's record."""

    def write_node(self, write: NodeWrite, record: NodeRecord) -> None:
        """Write the counts and the summary. `record` is the last record read."""
