"""Documents end to end: flat int32 tokens and labels with their lengths, in memory or in files.

==================  ========================================================================
``token_store``     :class:`TokenStore` and its accounting
``ingest``          samples to int32 chunks, in this process or in workers
``progress``        the bar
==================  ========================================================================
"""

from torchtune_packing.store.token_store import StoreAccounting, TokenStore

__all__ = ["StoreAccounting", "TokenStore"]
