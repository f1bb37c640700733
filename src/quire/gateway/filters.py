"""The old name of `quire_gateway.filters`, which hooks of users import."""

import sys
from importlib import import_module

# By name: `quire` itself does not depend on the other trees.
sys.modules[__name__] = import_module("quire_gateway.filters")
