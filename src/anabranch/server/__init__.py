"""The broker: a thin shell that runs the machines on sockets and disks."""
