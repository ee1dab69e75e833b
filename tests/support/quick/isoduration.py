"""Keeps jsonschema from importing the package of this name, and with it arrow, at each start of a Jupyter server or hub.

It checks a format ("duration") that no schema of Jupyter uses.
"""

raise ImportError("left out: no schema of Jupyter has a duration")
