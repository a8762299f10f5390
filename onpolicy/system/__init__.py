"""The operating system's services for a process: files, sockets, memory, signals, guards."""
