"""What crosses the broker's socket. No I/O; kernels load this room.

- `messages`: requests, replies and the routes of the lease API; `seats`: those of a hub
- `codec`: their JSON, requests decoded strictly and replies leniently
- `errors`: one tree of errors with codes; `limits`: how much of anything is accepted
- `versions`: the versions of both sides; `names`: names that people gave
- `states`: words for states
"""
