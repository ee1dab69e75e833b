"""Who is served next, on which device, and who leaves it for that."""
