"""`jupyter gpu measure`: measures which share of a GPU a program needs beside others on a device."""
