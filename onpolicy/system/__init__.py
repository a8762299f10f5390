"""What a process asks of the system it runs on: files, sockets, memory, its place among others."""
