"""A module that takes longer to import than a host may wait for a process."""

import time

time.sleep(60)
