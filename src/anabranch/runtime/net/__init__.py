"""Sockets: connections accepted, frames in, scattered parts out."""
