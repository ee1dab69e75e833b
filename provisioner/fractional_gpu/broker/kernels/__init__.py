"""One kernel as the broker sees it: its process, IOPub and extension, and the checks of what its client claims."""
