"""`python -m tokenmerge` is the `tokenmerge` command."""

import sys

from .cli import main

sys.exit(main())
