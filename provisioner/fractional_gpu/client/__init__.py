"""The client of the lease API: HTTP on a UNIX socket, discovery and start of the broker, seats. Light: kernels import it."""
