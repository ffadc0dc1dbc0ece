"""Brings many messages in at once, from Parquet files or another Pulsar topic: straight into the Delta tables.

The state learns of them by a rebuild. An imported message has a position that Pulsar gives to none.
"""
