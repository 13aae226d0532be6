"""What changes or feeds the linear maps and the routes, as files, numbers and graph fragments; no engine."""

from sluice.routing.heads import Heads, head_bytes
from sluice.routing.prerouter_file import PrerouterFile, PrerouterInfo, open_prerouter, write_prerouter
from sluice.routing.prerouter_init import init_prerouter

__all__ = [
    "Heads",
    "PrerouterFile",
    "PrerouterInfo",
    "head_bytes",
    "init_prerouter",
    "open_prerouter",
    "write_prerouter",
]
