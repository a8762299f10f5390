"""The module `python -m onpolicy.cli`, for where `onpolicy` is not on the path."""

import sys

from onpolicy.cli.main import main

sys.exit(main())
