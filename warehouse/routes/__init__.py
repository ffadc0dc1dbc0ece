"""What the warehouse knows of the settings' routes: now, earlier, and since when."""
