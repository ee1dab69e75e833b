"""What an engine (Slurm, Kubernetes) offers a node agent, and its errors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from fractional_gpu.protocol.errors import FractionalGPUError


class EngineError(FractionalGPUError):
    """The engine refuses, or its answer makes no sense; asking again helps only after an administrator's change."""

    code: ClassVar[str] = "engine"
    status: ClassVar[int] = 502


class EngineUnavailableError(EngineError):
    """The engine's controller does not answer now; it may later."""

    code: ClassVar[str] = "engine-unavailable"
    status: ClassVar[int] = 503


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A node as the engine reports it. Counts are in the engine's units, by their names there."""

    counts: Mapping[str, int]  # what it may give away
    in_use: Mapping[str, int]  # what it has given away, by its books
    most: Mapping[str, int]  # what the count may be set to
    text: str = ""  # all resources of the node, as the engine writes them
    summary: str = ""  # what an agent has published


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWrite:
    """Counts by the engine's names, and the summary's text. Equal writes are the same state."""

    counts: Mapping[str, int] = field(default_factory=dict)
    summary: str = ""


class Engine(Protocol):
    """An engine, for one node. Calls block for some seconds at most. Raises EngineUnavailableError or EngineError."""

    def read_node(self) -> NodeRecord:
        """Return the node's record."""

    def write_node(self, write: NodeWrite, record: NodeRecord) -> None:
        """`record` is the last one read."""
