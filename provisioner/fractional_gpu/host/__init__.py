"""The boundary to the operating system: processes, process trees, namespaces, control groups, memory and files."""
