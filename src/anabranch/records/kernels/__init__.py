"""Loops over the bytes of records, compiled by Numba when they are first called: scan, hash, filter, gather, encode."""
