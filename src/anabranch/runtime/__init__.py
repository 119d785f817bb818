"""The only door to the operating system: clock, disk, net, chance."""
