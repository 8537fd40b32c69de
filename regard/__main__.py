"""`python -m regard`, where the command `regard` is not on the path."""

import sys

from regard.cli import main

sys.exit(main())
