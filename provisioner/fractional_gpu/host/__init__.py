"""The boundary to the operating system: process identity, process trees, memory headroom."""
