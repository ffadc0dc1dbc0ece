"""The batch's outputs: tables, outcome topic and releases."""
