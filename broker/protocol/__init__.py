"""Pulsar's binary protocol, without sockets, clocks and threads, but for `connection.py` and `producer.py`."""
