"""`python -m tokenmerge` is the `tokenmerge` command."""

import sys

from .tools.cli.main import main

sys.exit(main())
