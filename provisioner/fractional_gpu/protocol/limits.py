"""Limits on everything that crosses the socket, in one place; docs/limits.md says what happens at each."""

MAX_BODY_BYTES = 256 * 1024  # one request's body
MAX_HEADER_BYTES = 16 * 1024
MAX_STRING = 4096  # any one string in a request
MAX_NAME = 200  # names, ids, labels
MAX_LIST = 4096  # entries of any one list or object in a request
MAX_DEPTH = 8  # objects and lists within each other
MAX_LEASES_PER_UID = 512
MAX_LEASES = 4096  # of all users; a lease has one ticket at most, so this bounds the queue, too
MAX_WAITERS_PER_LEASE = 16  # acquire streams of one lease at a time
MAX_CONNECTIONS_PER_UID = 2048  # or a quarter of the broker's descriptors, if that is less
REQUESTS_PER_S = 1000.0  # of one user, in the long run; a lease that shows its own token is counted by itself
REQUEST_BURST = 4000.0  # more than that at once
LEASE_REQUESTS_PER_S = 500.0  # of one lease that shows its own token
LEASE_REQUEST_BURST = 2000.0
IDLE_S = 30.0  # a connection on which no whole request head comes for so long is closed
BODY_S = 10.0  # a body that does not come within this is given up
TAKEN_S = 30.0  # a reply, or a line of a stream, that the peer does not take within this: the connection is closed
MAX_WAIT_S = 3600  # one acquire call; the caller asks again
PULSE_S = 10.0  # how often a connected extension proves that Python runs while its lease is not resident
PROTOCOL_VERSION = 1
VERSION_HEADER = "X-Jupyter-GPU-Version"  # of requests and replies: `VERSION; protocol=N`
