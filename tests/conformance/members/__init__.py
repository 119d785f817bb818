"""Members of groups: other people's consumers and ours, each kind in worker processes that can be stopped and killed.

A worker hosts any number of members of one library. It is told on standard input, one JSON object a line, to open a
member or let it leave, and tells on standard output what happens to each: what it owns, what it was handed, what it has
committed. Times are the system's monotonic clock, so that what several processes say can be put in order.
"""
