"""What users and administrators may do to leases and devices, and the status that shows them."""
