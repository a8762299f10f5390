"""`python -m onpolicy.cli`: `onpolicy`, where it is not on the path."""

import sys

from onpolicy.cli.main import main

sys.exit(main())
