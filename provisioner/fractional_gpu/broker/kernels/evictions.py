"""What an evicted kernel's successor is told: who ended the kernel before it, when and why.

Jupyter starts a kernel again under the same id, with another lease. The sentence waits for that lease; it is kept in memory, for the
last `_MOST` evictions.
"""

import time
from collections import OrderedDict
from typing import Final

from fractional_gpu.broker.kernels.kernel import Kernel
from fractional_gpu.broker.kernels.request_validation import Peer, user_name
from fractional_gpu.protocol.codec import printable

__all__ = ["EVICTED", "Evictions"]

EVICTED: Final = "evicted"  # the reason of the lease's end, and of the line in its successor's story
_MOST = 1000
_LONGEST_WHY = 300  # characters


class Evictions:
    """The evictions of one broker, by the kernel's user and id; everything runs on the broker's loop."""

    def __init__(self) -> None:
        self._sentences: OrderedDict[tuple[int, str], str] = OrderedDict()

    def begin(self, kernel: Kernel, peer: Peer, why: str) -> str:
        """Note that the kernel is being ended; return the sentence for its successor."""
        who = printable(peer.acting_for or user_name(peer.credentials.uid))
        because = f"; the reason given: {printable(why)[:_LONGEST_WHY].rstrip('.')}" if why.strip() else ""
        at = time.strftime("%H:%M", time.localtime())
        sentence = (
            f"An administrator ({who}) ended the kernel that was here before, at {at}, to free the GPU{because}. Its variables are lost: "
            "run the cells again."
        )
        if kernel.launch.kernel_id:
            self._sentences[kernel.uid, kernel.launch.kernel_id] = sentence
            if len(self._sentences) > _MOST:
                self._sentences.popitem(last=False)
        return sentence

    def failed(self, kernel: Kernel) -> None:
        """The kernel was not ended."""
        self._sentences.pop((kernel.uid, kernel.launch.kernel_id), None)

    def successor(self, kernel: Kernel) -> str:
        """Return, once, the sentence for a new lease of the same kernel id; empty: its last kernel was not evicted."""
        return self._sentences.pop((kernel.uid, kernel.launch.kernel_id), "")
