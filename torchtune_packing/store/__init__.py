"""Documents end to end: flat int32 tokens and labels with their lengths, in memory or in files.

==================  ========================================================================
``token_store``     ``TokenStore``
``files``           its files: streamed, renamed when whole, checked when opened
``cache``           one build per key and node; the stores of a folder
``key``             what a key is made of
``ingest``          samples to int32 chunks
``workers``         the same in worker processes
``accounting``      counts
``progress``        the bar
==================  ========================================================================

``python -m torchtune_packing.store ls|verify|rm`` looks after the stores of a folder.
"""

from torchtune_packing.store.accounting import StoreAccounting
from torchtune_packing.store.files import StoreError
from torchtune_packing.store.ingest import SampleReadError
from torchtune_packing.store.token_store import TokenStore

__all__ = ["SampleReadError", "StoreAccounting", "StoreError", "TokenStore"]
