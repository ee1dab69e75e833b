"""Commands about one lease or one device: suspend, resume, pin, move, evict, drain, resize."""
