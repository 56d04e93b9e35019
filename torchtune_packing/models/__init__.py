"""Models that the recipes and the quickstart train; torchtune is imported by the subpackages."""
