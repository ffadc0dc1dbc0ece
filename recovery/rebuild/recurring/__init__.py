"""Where the recurring messages stand, for a checkpoint that is rebuilt from the tables."""
