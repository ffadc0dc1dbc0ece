"""Where a batch's output goes: tables, outcome topic and releaser."""
