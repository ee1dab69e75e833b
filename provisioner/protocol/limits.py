"""Limits on everything that crosses the socket, in one place."""

MAX_BODY_BYTES = 256 * 1024  # one request's body
MAX_HEADER_BYTES = 16 * 1024
MAX_STRING = 4096  # any one string in a request
MAX_NAME = 200  # names, ids, labels
MAX_LEASES_PER_UID = 512
MAX_CONNECTIONS_PER_UID = 2048
MAX_WAIT_S = 3600  # one acquire call; the caller asks again
PULSE_S = 5.0  # how often a connected extension proves that Python runs while its lease is not resident
PROTOCOL_VERSION = 1
