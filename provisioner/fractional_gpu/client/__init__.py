"""The clients of the broker, and where to find it. Kernels load this room: it needs the standard library, msgspec and jupyter_core only.

- `client`: the lease API, one method for each route; `seat_client`: the same with a hub's routes
- `http`: one connection to the broker
- `discovery`: the broker's socket, and how a broker is started on it; `state_folder`: where that broker keeps its state
- `broker_process`: the process that listens on a socket; `silence`: a thread that notices when it does not answer
- `seat`: the seat that the hub gave this server
"""
