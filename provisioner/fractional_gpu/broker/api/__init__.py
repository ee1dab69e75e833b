"""The broker's HTTP API on its UNIX socket: server, request handling, limits and routes."""
