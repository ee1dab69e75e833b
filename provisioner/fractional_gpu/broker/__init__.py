"""The broker's event loop. It turns whatever happens on the host into arbiter events, and carries out the effects the arbiter returns."""
