"""A real hub on a real Slurm, as root: two users' servers are jobs on one node, and their kernels take turns on its device.

The jobs have control groups with the memory that the hub asked for: resident bytes of the simulated device are not charged to them,
saved ones are. `python -m tests.engines.hub_story` plays ten turns and more.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.engines.hub_story import USERS, Story, new_story
from tests.hub.pages import Visitor
from tests.support.service_page import Member
from tests.support.world import until

pytestmark = pytest.mark.promise("slurm-hub")


@pytest.fixture(scope="module")
def story() -> Iterator[Story]:
    with new_story(page={"admins": [USERS[0]], "cluster": "slurm"}) as story:
        yield story


def _cluster_page(story: Story, name: str) -> dict[str, Any] | None:
    view = Member(story.hub, name).status()
    return None if view["problem"] else view


@pytest.mark.timeout(600)
def test_two_users_share_a_nodes_device_and_no_byte_is_wrong_nor_does_a_killed_hub_change_that(story: Story) -> None:
    page = Visitor(story.hub, story.readers[0].name).get("hub/spawn")
    assert "2 nodes with 2 GPUs" in page.text
    assert "default/750" in page.choices
    story.begin(mib=16)
    jobs = story.jobs()
    assert {job["UserId"].partition("(")[0] for job in jobs} == {reader.name for reader in story.readers}
    assert {job["NodeList"] for job in jobs} == {"n1"}
    assert {job["TresPerNode"] for job in jobs} == {"gres:jgpu:open:750"}
    story.turn()
    seen = {name: until(partial(_cluster_page, story, name), f"{name} sees the cluster") for name in USERS}
    assert {row["name"]: row["state"] for row in seen[USERS[0]]["nodes"]} == {"n1": "in service", "n2": "in service"}
    shown = [(row["owner"], row["share"], row["node"]) for row in seen[USERS[0]]["servers"]]
    assert shown == [(name, "3/4 GPU", "n1") for name in sorted(USERS)]
    assert [row["owner"] for row in seen[USERS[1]]["servers"]] == [USERS[1]], "a user sees their own"
    story.restart_hub()
    story.turn()
    story.check()
    for reader in story.readers:
        story.hub.stop(reader.name)
    until(lambda: not story.jobs(), "no job is left")
    until(lambda: not story.nodes[0].status().leases, "no lease is left")
