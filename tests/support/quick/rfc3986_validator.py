"""Keeps jsonschema from importing the package of this name, which compiles long patterns at each start of a Jupyter server or hub.

It checks formats ("uri", "uri-reference") that no schema of Jupyter has to refuse in a test.
"""

raise ImportError("left out: its patterns take longer to compile than jsonschema to import")
