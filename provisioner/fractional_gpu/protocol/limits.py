"""Limits on everything that crosses the socket. docs/limits.md says what happens at each."""

MAX_BODY_BYTES = 256 * 1024  # one request's body
MAX_HEADER_BYTES = 16 * 1024
MAX_STRING = 4096  # any one string in a request
MAX_NAME = 200  # names, ids, labels
MAX_NOTE = 200  # characters of a user's note about a lease
MAX_VALUES = 4096  # in a request: the entries of all lists and objects
MAX_DEPTH = 8  # nesting of objects and lists
MAX_LEASES_PER_UID = 512
MAX_LEASES = 4096  # of all users; a lease has at most one ticket, so this bounds the queue, too
MAX_LAST_MS = 60_000  # how far back a question may look
MAX_CONNECTIONS = 64  # of one user ...
CONNECTIONS_PER_LEASE = 8  # ... and this many more for each lease with a process, and for each seat ...
MOST_CONNECTIONS = 2048  # ... up to this, or a quarter of the broker's descriptors, if that is less
COST_SHARE = 0.25  # of a processor, for one user's or seat's requests and kernel messages in the long run
COST_SHARE_OF_ALL = 0.5  # of a processor, shared equally by all overdrawn accounts
COST_BURST_S = 1.0  # extra seconds of processor time at once
COST_RESERVE_S = 0.2  # debt for gates' answers and leases' ends only; beyond it, nothing of the user is read
COST_WAIT_S = 2.0  # how long an overdrawn user's request waits before it is refused
COST_REQUEST_S = 0.0002  # per request, in addition to its handler's time
COST_CONNECTION_S = 0.00005  # for each connection
COST_BYTE_S = 50e-9  # per byte of a body or of a kernel's message
IDLE_S = 30.0  # a connection without a whole request head is then closed
BODY_S = 10.0  # for the whole body of a request to arrive
TAKEN_S = 30.0  # for the peer to read a reply or a stream's line; then the connection is closed
MAX_WAIT_S = 3600  # of one acquire call; the caller repeats it
PULSE_S = 10.0  # how often an extension proves that Python runs while its lease is not resident
PROTOCOL_VERSION = 1
VERSION_HEADER = "X-Jupyter-GPU-Version"  # of requests and replies: `VERSION; protocol=N`
