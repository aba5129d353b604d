"""Sizes at which a request's numbers do not depend on the other requests that are computed with it.

Invariant: what a request is answered is a function of its tokens, its seed and the weights, to the last bit, whoever
came at the same time: else one seed would not give the same losses on a machine that is busy.

A CPU's library adds a product's terms in another order where a matrix has few rows, and attention where its columns do
not fill the processor's vectors. Seen with torch 2.13 on AVX-512 in float32: products of fewer than 12 rows that are no
multiple of 4 (by MKL; by oneDNN of one row, see ``products``), and keys that are no multiple of 16, differ from those
of larger sizes in the last bit. So a few rows and columns more are computed, which nobody reads, where the cache and
the model's positions have room for them.
On a GPU, in bfloat16, and with more than two threads, this has not been tested.
"""

from __future__ import annotations

ENOUGH, ROWS, COLUMNS = 12, 4, 16


def even_rows(rows: int) -> int:
    """How many rows are computed in the place of so many."""
    return rows if rows >= ENOUGH else -(-rows // ROWS) * ROWS


def even_columns(columns: int) -> int:
    """How many positions are attended to in the place of so many."""
    return -(-columns // COLUMNS) * COLUMNS
