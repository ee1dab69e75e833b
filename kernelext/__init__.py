"""The IPython extension: gate, magics, memory limits, displays."""
