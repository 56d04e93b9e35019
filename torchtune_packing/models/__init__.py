"""Models that the recipes and the quickstart train, as torchtune modules."""

import torchtune_packing.needs_torchtune  # noqa: F401
