"""The settings' routes as the warehouse knows them: now, earlier, and since when."""
