"""The broker's event loop, which turns what happens on the host into arbiter events and carries out the effects the arbiter returns."""
