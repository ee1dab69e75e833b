"""Limits on everything that crosses the socket, in one place; docs/limits.md says what happens at each."""

MAX_BODY_BYTES = 256 * 1024  # one request's body
MAX_HEADER_BYTES = 16 * 1024
MAX_STRING = 4096  # any one string in a request
MAX_NAME = 200  # names, ids, labels
MAX_NOTE = 200  # characters of a user's note about a lease
MAX_VALUES = 4096  # in a request: entries of all its lists and objects
MAX_DEPTH = 8  # objects and lists within each other
MAX_LEASES_PER_UID = 512
MAX_LEASES = 4096  # of all users; a lease has one ticket at most, so this bounds the queue, too
MAX_LAST_MS = 60_000  # how far back such a question looks
MAX_CONNECTIONS = 64  # of one user ...
CONNECTIONS_PER_LEASE = 8  # ... and this many more for each lease with a process, and for each seat ...
MOST_CONNECTIONS = 2048  # ... up to this, or a quarter of the broker's descriptors, if that is less
COST_SHARE = 0.25  # of a processor, for what one user's or seat's requests and kernels' messages cost in the long run
COST_SHARE_OF_ALL = 0.5  # of a processor, for all together that have overdrawn theirs, in equal parts
COST_BURST_S = 1.0  # seconds of processor time more than that at once
COST_RESERVE_S = 0.2  # beyond that, for gates' answers and leases' ends alone; below it nothing of the user is read
COST_WAIT_S = 2.0  # a request of an overdrawn user waits so long for its turn before it is refused
COST_REQUEST_S = 0.0002  # for each request, in addition to its handler's time
COST_CONNECTION_S = 0.00005  # for each connection
COST_BYTE_S = 50e-9  # for each byte of a body or of a kernel's message
IDLE_S = 30.0  # a connection is closed after so long without a whole request head
BODY_S = 10.0  # for the whole body of a request to arrive
TAKEN_S = 30.0  # for the peer to read a reply or a line of a stream; then the connection is closed
MAX_WAIT_S = 3600  # of one acquire call; the caller repeats it
PULSE_S = 10.0  # how often a connected extension proves that Python runs while its lease is not resident
PROTOCOL_VERSION = 1
VERSION_HEADER = "X-Jupyter-GPU-Version"  # of requests and replies: `VERSION; protocol=N`
