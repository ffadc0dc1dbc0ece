"""Imports the items of other systems; a module for each system reads them."""
