"""`python -m specrouter` is the `specrouter` command."""

import sys

from specrouter.cli.main import main

sys.exit(main())
