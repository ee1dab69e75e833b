"""One kernel as the broker sees it: its process, its IOPub, its extension, and the checks of its client's claims."""
