"""An agent that calls tools over MCP: reads `{"tool": NAME, "arguments": {...}}` lines, and writes one line of JSON for each answer.

    python -P tests/support/mcp_agent.py URL

The first line that it writes lists the tools.
"""

import asyncio
import json
import sys

from fastmcp import Client
from fastmcp.exceptions import ToolError


async def main(url: str) -> None:
    async with Client(url) as client:
        _say([one.model_dump(mode="json", by_alias=True) for one in await client.list_tools()])
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked = json.loads(line)
            try:
                reply = await client.call_tool(asked["tool"], asked["arguments"])
            except ToolError as error:
                _say({"error": str(error)})
            else:
                _say(reply.structured_content)


def _say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
