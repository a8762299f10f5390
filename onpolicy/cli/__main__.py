"""`python -m onpolicy.cli`, which is how torchrun starts a rank."""

import sys

from onpolicy.cli.main import main

sys.exit(main())
