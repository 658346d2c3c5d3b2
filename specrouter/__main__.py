"""`python -m specrouter` is the `specrouter` command."""

import sys

from specrouter.cli import main

sys.exit(main())
