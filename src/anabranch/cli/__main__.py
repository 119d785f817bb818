"""`python -m anabranch.cli`."""

from anabranch.cli.entry import main

main()
