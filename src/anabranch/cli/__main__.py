"""`python -m anabranch.cli`."""

from anabranch.cli.main import main

main()
