"""The clients of the broker, and where to find it. Kernels load this room: it needs the standard library, msgspec and jupyter_core only.

- `client`: the lease API, one method for each route, and a thread that notices when the broker does not answer
- `http`: one connection to the broker
- `discovery`: the broker's socket, the process that listens on it, and how a broker is started on it
- `state_folder`: where that broker keeps its state
- `seat`: the seat that the hub gave this server, and the hub's routes
- `threads`: blocking calls beside an event loop
- `following`: calls from an event loop, and the status as it changes
"""
