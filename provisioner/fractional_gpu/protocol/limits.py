"""Limits on everything that crosses the socket, in one place; docs/limits.md says what happens at each."""

MAX_BODY_BYTES = 256 * 1024  # one request's body
MAX_HEADER_BYTES = 16 * 1024
MAX_STRING = 4096  # any one string in a request
MAX_NAME = 200  # names, ids, labels
MAX_LIST = 4096  # entries of any one list or object in a request
MAX_DEPTH = 8  # objects and lists within each other
MAX_LEASES_PER_UID = 512
MAX_LEASES = 4096  # of all users; a lease has one ticket at most, so this bounds the queue, too
MAX_LEASES_NAMED = 64  # in one question what others use: the tenants of one measurement
MAX_LAST_MS = 60_000  # how far back such a question looks
MAX_WAITERS_PER_LEASE = 16  # acquire streams of one lease at a time
MAX_CONNECTIONS_PER_UID = 2048  # or a quarter of the broker's descriptors, if that is less
REQUESTS_PER_S = 1000.0  # of one user, in the long run; requests with a lease's token count for that lease instead
REQUEST_BURST = 4000.0  # more than that at once
LEASE_REQUESTS_PER_S = 500.0  # of one lease, by its token
LEASE_REQUEST_BURST = 2000.0
IDLE_S = 30.0  # a connection is closed after so long without a whole request head
BODY_S = 10.0  # for the whole body of a request to arrive
TAKEN_S = 30.0  # for the peer to read a reply or a line of a stream; then the connection is closed
MAX_WAIT_S = 3600  # of one acquire call; the caller repeats it
PULSE_S = 10.0  # how often a connected extension proves that Python runs while its lease is not resident
PROTOCOL_VERSION = 1
VERSION_HEADER = "X-Jupyter-GPU-Version"  # of requests and replies: `VERSION; protocol=N`
