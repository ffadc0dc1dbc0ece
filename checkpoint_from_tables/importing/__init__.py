"""Imports many messages at once from Parquet files or another Pulsar topic, straight into the Delta tables.

A rebuild then puts them into the state. Imported messages have positions that no Pulsar cluster gives.
"""
