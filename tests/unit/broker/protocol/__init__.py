"""Tests of Pulsar's binary protocol, without a broker."""
