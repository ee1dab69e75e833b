"""`jupyter gpu explain`: why everything happened to a kernel, and why it is as it is."""

import argparse
import time
from datetime import datetime

from fractional_gpu.commands.leases.lease_calls import configure_lease, steer
from fractional_gpu.commands.terminal.render import expected_wait, lease_name, state_in_words
from fractional_gpu.protocol.messages import LeaseStatus, Story

__all__ = ["configure", "render_story", "run"]

EPILOG = """\
examples:
  jupyter gpu explain 3f2a              the kernel's story, oldest first
  jupyter gpu explain 3f2a --json       the same with machine-readable reasons and times since 1970
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    parser.description = "Tell why a kernel waited, was suspended, moved or refused something."
    parser.epilog = EPILOG
    configure_lease(parser)


def run(options: argparse.Namespace) -> int:
    """Tell the story."""
    return steer(
        options,
        "reading the story of",
        lambda client, lease_id: client.story(lease_id),
        lambda lease, story: render_story(lease, story, int(time.time() * 1000)),
    )


def render_story(lease: LeaseStatus, story: Story, now_ms: int) -> str:
    """Return what happened, one line each, and how it stands now."""
    lines = [f"... {story.omitted} older lines"] if story.omitted else []
    lines += [f"{_moment(line.at_ms, now_ms)}  {line.sentence}  ({line.reason})" for line in story.lines]
    now = f"{lease_name(lease)}: {state_in_words(lease)}"
    if lease.position is not None:
        now += f"; waits at place {lease.position}: {lease.sentence}{expected_wait(lease)}"
    return "\n".join([*lines, now])


def _moment(at_ms: int, now_ms: int) -> str:
    """Return the local time, with its day if that is not today."""
    at, now = (datetime.fromtimestamp(ms / 1000).astimezone() for ms in (at_ms, now_ms))
    return f"{at:%H:%M:%S}" if at.date() == now.date() else f"{at:%Y-%m-%d %H:%M:%S}"
