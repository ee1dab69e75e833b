"""Limits on everything sent over the socket. docs/limits.md says what happens when each limit is reached."""

MAX_BODY_BYTES = 256 * 1024  # one request's body
MAX_HEADER_BYTES = 16 * 1024
MAX_STRING = 4096  # any one string in a request
MAX_NAME = 200  # names, ids, labels
MAX_NOTE = 200  # characters of a user's note about a lease
MAX_VALUES = 4096  # the entries of all lists and objects in a request
MAX_DEPTH = 8  # nesting of objects and lists
MAX_LEASES_PER_UID = 512
MAX_LEASES = 4096  # of all users; a lease has at most one ticket, so this bounds the queue, too
MAX_LAST_MS = 60_000  # the longest period that a query may look back
MAX_CONNECTIONS = 64  # per user ...
CONNECTIONS_PER_LEASE = 8  # ... and this many more for each lease with a process, and for each seat ...
MOST_CONNECTIONS = 2048  # ... up to this, or a quarter of the broker's descriptors, if that is less
COST_SHARE = 0.25  # share of a processor for the requests and kernel messages of one user or seat in the long run
COST_SHARE_OF_ALL = 0.5  # share of a processor that all overdrawn accounts divide equally
COST_BURST_S = 1.0  # extra processor time that an account may use at once
COST_RESERVE_S = (
    0.2  # debt allowed for gate answers and lease releases only; beyond it, the user's requests are not read
)
COST_WAIT_S = 2.0  # how long an overdrawn user's request waits before it is refused
COST_REQUEST_S = 0.0002  # for each request, in addition to the time of its handler
COST_CONNECTION_S = 0.00005  # for each connection
COST_BYTE_S = 50e-9  # for each byte of a body or of a kernel's message
IDLE_S = 30.0  # a connection that sends no complete request head for this long is closed
BODY_S = 10.0  # time for the whole body of a request to arrive
TAKEN_S = 30.0  # time for the peer to read a reply or a line of a stream, after which the connection is closed
MAX_WAIT_S = 3600  # longest wait of one acquire call; the caller repeats the call
PULSE_S = 10.0  # how often a keep-alive shows whether an extension runs Python while its lease is not resident
PROTOCOL_VERSION = 1
VERSION_HEADER = "X-Jupyter-GPU-Version"  # in requests and replies: `VERSION; protocol=N`
