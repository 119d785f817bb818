"""The command line: `anabranch`."""
