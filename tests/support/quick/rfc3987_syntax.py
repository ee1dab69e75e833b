"""Keeps jsonschema from importing the package of this name, which compiles a grammar at each start of a Jupyter server or hub.

That takes three quarters of the time in which a server loads, and checks a format ("iri") that no schema of Jupyter uses.
"""

raise ImportError("left out: its import takes longer than a Jupyter server's")
