"""What crosses the broker's socket. No I/O; kernels load this room.

- `routes`: the one table of all routes
- `messages`: their requests and replies; `seats`: those of a hub
- `status`: the state and the past of leases, devices and the host
- `accounts`: what leases used and what it costs; `advice`: what is suggested about a share
- `codec`: their JSON, requests decoded strictly and replies leniently
- `errors`: one tree of errors with codes; `limits`: how much of anything is accepted
- `nodes`: what a host could still give, and what a node's agent publishes
- `names`: names that people gave, words for states, and the versions of both sides
"""
