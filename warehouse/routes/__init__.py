"""The routes that the warehouse knows: those of the settings, earlier ones, and since when they are there."""
