"""The interface to the operating system: processes, process trees, namespaces, control groups, memory and files."""
