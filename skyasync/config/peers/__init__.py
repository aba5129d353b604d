"""How other systems spell our keys, and what becomes of those that have no counterpart.

Invariant: a key that a system's table holds is answered from the table, never by likeness. One table per system,
``tables/NAME.tsv``, of facts from the system's own definitions of its arguments (2026); ``table.py`` says how to
read and extend one. Nothing here imports torch.
"""

from skyasync.config.peers.convert import Around, NoCounterpartError, converted
from skyasync.config.peers.hints import key_hint, value_hint
from skyasync.config.peers.table import SYSTEMS, Row, Table, tables

__all__ = ["SYSTEMS", "Around", "NoCounterpartError", "Row", "Table", "converted", "key_hint", "tables", "value_hint"]
