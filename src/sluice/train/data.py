"""Text to train on, from files to batches, in one place to import from. Knows how none of it is done."""

from sluice.train.batches import Batches
from sluice.train.prepare import prepare
from sluice.train.shards import Documents, Meta, Shard, Tokens

__all__ = ["Batches", "Documents", "Meta", "Shard", "Tokens", "prepare"]
