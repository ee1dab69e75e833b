"""An agent that calls tools over MCP: reads lines of JSON (`id`, `tool`, `arguments`), and writes one for each answer (`id`, `answer`).

    python -P tests/support/mcp_agent.py URL

The first line that it writes lists the tools. Calls run at the same time, and each answer has the `id` of its call.
"""

import asyncio
import json
import sys

from fastmcp import Client
from fastmcp.exceptions import ToolError


async def main(url: str) -> None:
    async with Client(url) as client, asyncio.TaskGroup() as calls:
        _say([one.model_dump(mode="json", by_alias=True) for one in await client.list_tools()])
        while line := await asyncio.to_thread(sys.stdin.readline):
            calls.create_task(_answer(client, **json.loads(line)))


async def _answer(client: Client, id: int, tool: str, arguments: dict[str, object]) -> None:  # noqa: A002
    try:
        reply = await client.call_tool(tool, arguments)
    except ToolError as error:
        _say({"id": id, "answer": json.loads(str(error))})
    else:
        _say({"id": id, "answer": reply.structured_content})


def _say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
