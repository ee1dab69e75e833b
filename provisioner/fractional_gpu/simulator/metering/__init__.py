"""The meter in virtual time: what the leases of a run use and its devices draw, and the file of that."""
