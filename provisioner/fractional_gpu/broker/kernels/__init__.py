"""One kernel as the broker sees it: its process, IOPub and extension, and the checks on its client's claims."""
