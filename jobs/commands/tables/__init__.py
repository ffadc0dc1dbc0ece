"""Commands about the tables as a whole: queries, audit, maintenance, backup, rebuild, and import."""
